// A beam search as a tree: what its answers begin with together is written once, and parts where they part.

import { counted, make } from "./parts.js";
import { percent, TokenView } from "./tokens.js";

export class BeamTree {
  /** `box` is filled: while the search runs with what is settled, that is, with what every beam begins with. */
  constructor(box, width) {
    this.box = box;
    this.width = width;
    this.answers = []; // by rank: the tokens of each
    this.settled = new TokenView(make("div", { className: "run" }), "What all beams begin with,");
    this.note = make("p", { className: "quiet" });
    box.replaceChildren(this.settled.box, this.note);
    this.#tell();
  }

  add(index, tokens) {
    (this.answers[index] ??= []).push(...tokens);
    if (index > 0) return;
    this.settled.add(tokens);
    this.#tell();
  }

  #tell() {
    const count = this.settled.tokens.length;
    this.note.textContent = `${this.width} beams are searched; they agree on ${count ? `the first ${counted(count, "token")}` : "nothing yet"}.`;
  }

  /** All answers are there, the best first; unless it ended early, for the reason given. */
  end(why = "") {
    if (why) this.note.textContent = why;
    else this.#grow();
  }

  #grow() {
    const answers = this.answers.filter((tokens) => tokens?.length).map((tokens, rank) => ({ rank, tokens, logprob: sum(tokens) }));
    if (!answers.length) return;
    const best = Math.max(...answers.map((each) => each.logprob));
    const mass = answers.reduce((total, each) => total + Math.exp(each.logprob - best), 0);
    for (const each of answers) each.share = Math.exp(each.logprob - best) / mass;
    const tree = make("ol", { className: "tree" }, this.#node(branch(answers, 0), answers.length > 1));
    this.box.replaceChildren(tree);
  }

  #node({ answers, tokens, ending, branches }, isShared) {
    const share = answers.reduce((total, each) => total + each.share, 0);
    const run = make("div", { className: "run" });
    new TokenView(run, isShared ? `Shared by ${answers.length} answers,` : `Answer ${answers[0].rank + 1} from here on,`).add(tokens);
    const node = make("li", { className: "node" }, run);
    node.style.setProperty("--weight", `${(1.5 + 5 * share).toFixed(1)}px`);
    node.dataset.ranks = answers.map((each) => each.rank).join(" ");
    for (const answer of ending) node.append(this.#leaf(answer));
    if (branches.length) node.append(make("ol", {}, ...branches.map((each) => this.#node(each, each.answers.length > 1))));
    return node;
  }

  /** Where an answer ends: its rank, how likely it is, and a button that shows its way through the tree. */
  #leaf(answer) {
    const bar = make("span", { className: "leaf-bar" });
    bar.style.setProperty("--share", answer.share.toFixed(3));
    const numbers = `${counted(answer.tokens.length, "token")}, log-probability ${answer.logprob.toFixed(2).replace("-", "−")}`;
    const leaf = make("button", { type: "button", className: "leaf" },
      make("span", { className: "rank" }, String(answer.rank + 1)), make("span", {}, numbers), bar, make("span", {}, percent(answer.share)));
    leaf.title = "The share is of the probability of the answers shown. Click to see this answer's way.";
    leaf.setAttribute("aria-pressed", "false");
    leaf.addEventListener("click", () => this.#choose(leaf, answer.rank));
    return leaf;
  }

  #choose(leaf, rank) {
    const isChosen = leaf.getAttribute("aria-pressed") === "false";
    for (const other of this.box.querySelectorAll(".leaf")) other.setAttribute("aria-pressed", String(other === leaf && isChosen));
    for (const node of this.box.querySelectorAll(".node")) {
      node.classList.toggle("is-aside", isChosen && !node.dataset.ranks.split(" ").includes(String(rank)));
    }
  }
}

const sum = (tokens) => tokens.reduce((total, token) => total + (token.logprob ?? 0), 0);

/** The tree of these answers from the token `start` on; all of them are equal before it. */
export function branch(answers, start) {
  const [first] = answers;
  let end = start;
  while (end < first.tokens.length && answers.every((each) => each.tokens[end]?.id === first.tokens[end].id)) end++;
  const ways = new Map();
  for (const each of answers.filter((each) => each.tokens.length > end)) {
    const id = each.tokens[end].id;
    ways.set(id, [...(ways.get(id) ?? []), each]);
  }
  return {
    answers,
    tokens: first.tokens.slice(start, end),
    ending: answers.filter((each) => each.tokens.length === end),
    branches: [...ways.values()].map((each) => branch(each, end)),
  };
}
