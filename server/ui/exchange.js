// One exchange of the playground: what was asked, and what is answered, as it comes.

import { BeamTree } from "./beams.js";
import { make, seconds } from "./parts.js";
import { TokenView, tokensOf } from "./tokens.js";

/** One exchange: what was asked and, side by side, what was answered. */
export class ExchangeView {
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
    const { n, best_of: bestOf, use_beam_search: searches } = this.exchange.body;
    this.tree = null;
    if (searches) {
      const box = make("section", { className: "answer beams" });
      box.setAttribute("aria-label", "Beams");
      this.answers.append(box);
      this.tree = new BeamTree(box, bestOf ?? n ?? 1);
    } else for (let index = 0; index < (n ?? 1); index++) this.#card(index);
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
      const tokens = tokensOf(choice);
      if (this.tree) {
        this.tree.add(choice.index, tokens);
        continue;
      }
      const card = this.#card(choice.index);
      const text = choice.delta ? choice.delta.content ?? "" : choice.text;
      card.said += text;
      if (tokens.length) {
        card.tokens ??= new TokenView(card.text);
        card.tokens.add(tokens);
      } else if (!card.tokens) card.text.append(text);
      card.element.classList.toggle("is-done", Boolean(choice.finish_reason));
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
    // Answers that are ranked come all at once at the end: their pace is that of the whole.
    const isRanked = this.tree || this.exchange.body.best_of > (this.exchange.body.n ?? 1);
    const spent = (performance.now() - (isRanked ? this.started : this.first)) / 1000;
    if (this.numTokens > 1 && spent > 0) parts.push(`${((this.numTokens - 1) / spent).toFixed(1)} tokens/s`);
    if (this.numTokens) parts.push(`${this.promptTokens} + ${this.numTokens} tokens`);
    this.numbers.textContent = parts.join("  ·  ");
  }

  end(why = "") {
    this.#count();
    this.element.classList.remove("is-running");
    this.tree?.end(why);
    for (const card of this.cards.values()) card.foot.textContent ||= why;
  }

  fail(message) {
    this.end("failed");
    if (this.first === null) this.answers.replaceChildren();
    this.answers.append(make("p", { className: "error", role: "alert" }, message));
  }
}
