// Chat and completion: one exchange at a time, with its answers side by side.

import { call, eventsOf, signedInKey } from "./api.js";
import { $, make, seconds } from "./parts.js";
import { hide, TokenView, tokensOf } from "./tokens.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

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
      if (event.key === "Enter" && !event.shiftKey && this.kind === "chat" && !event.isComposing) {
        event.preventDefault();
        $("composer").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
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
      } else if (this.onRefused(error)) view.fail("Not sent: sign in, then try again.");
      else view.fail(error.message);
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

/** One exchange: what was asked and, side by side, what was answered. */
class ExchangeView {
  constructor(exchange, kind, onRetry) {
    this.exchange = exchange;
    this.answers = make("div", { className: "answers" });
    this.numbers = make("span", { className: "quiet" });
    const retry = make("button", { type: "button", className: "plain retry" }, "Try again");
    retry.addEventListener("click", onRetry);
    this.foot = make("div", { className: "exchange-foot" }, this.numbers, retry);
    const said = make("div", { className: kind === "chat" ? "said" : "said is-text" }, exchange.text);
    this.element = make("article", { className: "exchange" }, said, this.answers, this.foot);
    this.restart();
  }

  restart() {
    this.started = performance.now();
    this.first = null;
    this.numTokens = 0;
    this.cards = new Map();
    this.numbers.textContent = "";
    this.answers.replaceChildren();
    this.element.classList.add("is-running");
    for (let index = 0; index < (this.exchange.body.n ?? 1); index++) this.#card(index);
  }

  #card(index) {
    if (this.cards.has(index)) return this.cards.get(index);
    const text = make("div", { className: "answer-text" });
    const foot = make("p", { className: "quiet answer-foot" });
    const element = make("section", { className: "answer" }, text, foot);
    element.setAttribute("aria-label", `Answer ${index + 1}`);
    const card = { element, text, foot, said: "", tokens: null };
    this.cards.set(index, card);
    this.answers.append(element);
    if (this.exchange.body.n > 1 && this.exchange.body.messages) {
      const keep = make("input", { type: "radio", name: `keep-${Math.round(this.started)}`, checked: index === 0 });
      keep.addEventListener("change", () => (this.exchange.answer = card.said));
      card.keep = keep;
      element.prepend(make("label", { className: "check quiet" }, keep, make("span", {}, `Answer ${index + 1}`)));
    }
    return card;
  }

  add(chunk) {
    for (const choice of chunk.choices) {
      this.first ??= performance.now();
      const card = this.#card(choice.index);
      const tokens = tokensOf(choice);
      const text = choice.delta ? choice.delta.content ?? "" : choice.text;
      card.said += text;
      if (tokens.length) {
        card.tokens ??= new TokenView(card.text);
        card.tokens.add(tokens);
      } else if (!card.tokens) card.text.append(text);
      if (choice.finish_reason) card.foot.textContent = { stop: "ended by itself", length: "cut at max tokens" }[choice.finish_reason] ?? choice.finish_reason;
      if (card.keep?.checked ?? choice.index === 0) this.exchange.answer = card.said;
    }
    if (chunk.usage) {
      this.numTokens = chunk.usage.completion_tokens;
      this.promptTokens = chunk.usage.prompt_tokens;
    }
    this.#count();
  }

  #count() {
    if (this.first === null) return;
    const parts = [`first token after ${seconds((this.first - this.started) / 1000)}`];
    const spent = (performance.now() - this.first) / 1000;
    if (this.numTokens > 1 && spent > 0) parts.push(`${((this.numTokens - 1) / spent).toFixed(1)} tokens/s`);
    if (this.numTokens) parts.push(`${this.promptTokens} + ${this.numTokens} tokens`);
    this.numbers.textContent = parts.join("  ·  ");
  }

  end(why = "") {
    this.#count();
    this.element.classList.remove("is-running");
    for (const card of this.cards.values()) card.foot.textContent ||= why;
  }

  fail(message) {
    this.end();
    this.answers.append(make("p", { className: "error", role: "alert" }, message));
  }
}

function scrollToEnd(box) {
  // Only for those who read along: who has scrolled up stays there.
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

function asCurl(body) {
  const path = PATHS[body.messages ? "chat" : "completion"];
  const text = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = signedInKey() ? " \\\n  -H \"Authorization: Bearer $PAGESTREAM_API_KEY\"" : "";
  return `curl -N ${new URL(path, document.baseURI)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'\n`;
}

const OPENAI_OWN = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "n", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop",
  "logprobs", "top_logprobs",
]);

function asPython(body) {
  const own = Object.entries(body).filter(([name]) => OPENAI_OWN.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_OWN.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra))},`);
  const [method, text] = body.messages ? ["chat.completions", ".delta.content or \"\""] : ["completions", ".text"];
  const key = signedInKey() ? "os.environ[\"PAGESTREAM_API_KEY\"]" : "\"none\"";
  return [
    ...(signedInKey() ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", document.baseURI).href)}, api_key=${key})`,
    `stream = client.${method}.create(`, ...lines, "    stream=True,", ")",
    "for chunk in stream:", `    print(chunk.choices[0]${text}, end="", flush=True)`, "",
  ].join("\n");
}

/** The value as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
