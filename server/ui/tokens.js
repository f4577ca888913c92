// An answer token by token, each shaded by how likely it was, with its rivals on hover or by the arrow keys.

import { $, make } from "./parts.js";

/** Tokens of a chunk's choice as [{id, text, logprob, rivals: [[text, logprob]]}], whichever kind of request it answers. */
export function tokensOf(choice) {
  const scores = choice.logprobs;
  if (!scores) return [];
  const id = (at) => choice.token_ids?.[at]; // only where the request asked for them
  if (scores.content) {
    return scores.content.map((each, at) => ({
      id: id(at), text: each.token, logprob: each.logprob, rivals: each.top_logprobs.map((top) => [top.token, top.logprob]),
    }));
  }
  return scores.tokens.map((text, at) => ({
    id: id(at), text, logprob: scores.token_logprobs[at], rivals: Object.entries(scores.top_logprobs[at] ?? {}),
  }));
}

export class TokenView {
  constructor(box, name = "Answer") {
    this.box = box;
    box.classList.add("tokens");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${name} by tokens; the arrow keys walk through them`);
    this.tokens = [];
    this.at = -1;
    box.addEventListener("pointerover", (event) => this.#show(event.target.closest(".token")));
    box.addEventListener("pointerleave", () => this.#show(null));
    box.addEventListener("blur", () => this.#show(null));
    box.addEventListener("keydown", (event) => this.#walk(event));
  }

  add(tokens) {
    for (const token of tokens) {
      const probability = Math.exp(token.logprob ?? 0);
      // A token without text, as the end of an answer is, gets a sign by the style sheet: it can be pointed at like the others.
      const element = make("span", { className: "token" }, ...(token.text ? [token.text] : []));
      element.style.setProperty("--surprise", (1 - probability).toFixed(3));
      element.dataset.index = this.tokens.length;
      this.tokens.push(token);
      this.box.append(element);
    }
  }

  #walk(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.#show(null);
    if (!move || !this.tokens.length) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(this.tokens.length - 1, this.at + move));
    this.#show(this.box.children[this.at]);
  }

  #show(element) {
    this.box.querySelector(".chosen")?.classList.remove("chosen");
    if (!element) return hide();
    element.classList.add("chosen");
    this.at = Number(element.dataset.index);
    const token = this.tokens[this.at];
    const rows = [[token.text, token.logprob], ...token.rivals.filter(([text]) => text !== token.text)]
      .sort((one, other) => other[1] - one[1])
      .map(([text, logprob]) => row(text, Math.exp(logprob), text === token.text));
    const hint = $("hint");
    hint.replaceChildren(...rows);
    hint.hidden = false;
    const place = element.getBoundingClientRect();
    const below = place.bottom + hint.offsetHeight + 12 < innerHeight;
    hint.style.top = `${below ? place.bottom + 6 : place.top - hint.offsetHeight - 6}px`;
    hint.style.left = `${Math.max(8, Math.min(place.left, innerWidth - hint.offsetWidth - 8))}px`;
    this.box.setAttribute("aria-description", `${JSON.stringify(token.text)}, ${percent(Math.exp(token.logprob))}`);
  }
}

function row(text, probability, isChosen) {
  const bar = make("span", { className: "hint-bar" });
  bar.style.width = `${Math.max(1, probability * 72)}px`;
  const shown = make("code", {}, JSON.stringify(text).slice(1, -1) || "(no text)");
  return make("div", { className: isChosen ? "hint-row is-chosen" : "hint-row" }, shown, bar, make("span", {}, percent(probability)));
}

export const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

export function hide() {
  $("hint").hidden = true;
}
