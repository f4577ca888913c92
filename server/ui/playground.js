// Chat and completion: one exchange at a time, with its answers side by side.

import { call, eventsOf } from "./api.js";
import { asCurl, asPython, PATHS } from "./copies.js";
import { ExchangeView } from "./exchange.js";
import { $, make } from "./parts.js";
import { hide } from "./tokens.js";

export class Playground {
  constructor({ model, parameters, onRefused }) {
    this.model = model;
    this.parameters = parameters;
    this.onRefused = onRefused; // told of an error; returns whether it has been dealt with
    this.exchanges = [];
    this.running = null;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send($("prompt").value);
    });
    $("prompt").addEventListener("keydown", (event) => {
      // A completion's text has line breaks of its own: there it takes Ctrl, or Command, to send.
      const sends = event.ctrlKey || event.metaKey || (this.kind === "chat" && !event.shiftKey);
      if (event.key === "Enter" && sends && !event.isComposing) {
        event.preventDefault();
        $("composer").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    const shade = () => $("thread").classList.toggle("is-shaded", $("show-tokens").checked);
    $("show-tokens").addEventListener("change", shade);
    shade();
    $("copy-curl").addEventListener("click", () => this.copy(asCurl, "curl"));
    $("copy-python").addEventListener("click", () => this.copy(asPython, "Python"));
    for (const radio of document.getElementsByName("kind")) radio.addEventListener("change", () => this.#switch());
    this.#switch();
  }

  get kind() {
    return document.querySelector("[name=kind]:checked").value;
  }

  clear() {
    this.running?.abort();
    this.exchanges = [];
    hide();
    this.#welcome();
    $("prompt").focus();
  }

  /** The request as it would be sent now, with this as its last message or its prompt. */
  body(text, exchanges = this.exchanges) {
    const body = { model: this.model() };
    if (this.kind === "chat") {
      body.messages = [];
      if ($("system").value.trim()) body.messages.push({ role: "system", content: $("system").value });
      for (const each of exchanges.filter((each) => each.answer)) {
        body.messages.push({ role: "user", content: each.text }, { role: "assistant", content: each.answer });
      }
      body.messages.push({ role: "user", content: text });
    } else body.prompt = text;
    Object.assign(body, this.parameters.values(this.kind));
    if ($("show-tokens").checked) Object.assign(body, this.kind === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
    return body;
  }

  async send(text) {
    if (this.running || !text.trim()) return;
    $("thread").querySelector(".welcome")?.remove();
    const exchange = { text, answer: "", body: this.body(text) };
    exchange.view = new ExchangeView(exchange, this.kind, () => this.#retry(exchange));
    this.exchanges.push(exchange);
    $("thread").append(exchange.view.element);
    if (this.kind === "chat") $("prompt").value = "";
    await this.#run(exchange);
  }

  async #retry(exchange) {
    if (this.running) return;
    // What came after it was said to another answer.
    const at = this.exchanges.indexOf(exchange);
    for (const later of this.exchanges.splice(at + 1)) later.view.element.remove();
    exchange.body = this.body(exchange.text, this.exchanges.slice(0, at));
    exchange.answer = "";
    exchange.view.restart();
    await this.#run(exchange);
  }

  async #run(exchange) {
    this.running = new AbortController();
    this.#show(true);
    const view = exchange.view;
    const path = PATHS["messages" in exchange.body ? "chat" : "completion"];
    const body = { ...exchange.body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    // Where beams part is told by their tokens, not by their text.
    if (body.use_beam_search) Object.assign(body, { logprobs: body.logprobs ?? 5, return_token_ids: true });
    try {
      const response = await call(path, { body, signal: this.running.signal });
      for await (const chunk of eventsOf(response)) {
        view.add(chunk);
        scrollToEnd($("thread"));
      }
      view.end();
      $("status").textContent = "The answer is complete.";
    } catch (error) {
      if (error.name === "AbortError") {
        view.end("stopped");
        $("status").textContent = "Stopped.";
      } else {
        view.fail(this.onRefused(error) ? "Not sent: sign in, then try again." : error.message);
        $("status").textContent = "That failed.";
      }
    } finally {
      this.running = null;
      this.#show(false);
    }
  }

  #show(isRunning) {
    $("send").hidden = isRunning;
    $("stop").hidden = !isRunning;
    if (isRunning) $("status").textContent = "Answering…";
    else if (document.activeElement === document.body) $("prompt").focus();
  }

  #switch() {
    const isChat = this.kind === "chat";
    $("system-field").hidden = !isChat;
    this.parameters.show(this.kind);
    $("prompt").placeholder = isChat ? "Ask something…" : "Once upon a time";
    $("prompt").previousElementSibling.textContent = isChat ? "Your message" : "The text to continue";
    $("send").textContent = isChat ? "Send" : "Complete";
    this.clear();
  }

  #welcome() {
    const tries = this.kind === "chat"
      ? ["Tell me a short story about a lighthouse.", "Name three fruits and their colours."]
      : ["Once upon a time", "The capital of France is"];
    const buttons = tries.map((text) => {
      const button = make("button", { type: "button", className: "plain" }, text);
      button.addEventListener("click", () => this.send(text));
      return button;
    });
    $("thread").replaceChildren(make("div", { className: "welcome" },
      make("p", {}, this.kind === "chat" ? "Talk with the model." : "Let the model go on from a text."), ...buttons));
  }

  async copy(write, name) {
    const text = $("prompt").value.trim() ? $("prompt").value : this.exchanges.at(-1)?.text ?? "Hello";
    const last = this.exchanges.at(-1);
    const body = !$("prompt").value.trim() && last ? last.body : this.body(text);
    try {
      await navigator.clipboard.writeText(write(body));
      $("status").textContent = `Copied as ${name}.`;
    } catch {
      $("status").textContent = "The browser did not let the text be copied.";
    }
  }
}

function scrollToEnd(box) {
  // Only for those who read along: who has scrolled up stays there.
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}
