// The live view: tiles, block maps, requests, one request's story, charts.

import { call, eventsOf } from "./api.js";
import { Chart } from "./charts.js";
import { EngineState, stepTime } from "./engine-state.js";
import { BlockGrid } from "./grid.js";
import { $, colourOf, compact, counted, isDark, make, seconds, whole } from "./parts.js";

const STATES = { running: "running", swapped: "swapped out", waiting: "waiting", ended: "ended" };
const ORDER = ["running", "swapped", "waiting"];
const AGAIN_MS = 2000;
const REST_MS = 1000;

export class LiveView {
  constructor({ onRefused }) {
    this.onRefused = onRefused;
    this.state = new EngineState();
    this.chosen = null;
    this.stream = null;
    this.isDrawing = false;
    const onChoose = (number) => this.choose(number);
    this.grid = new BlockGrid($("grid"), { note: $("block-note"), onChoose });
    this.swapGrid = new BlockGrid($("swap-grid"), { note: $("block-note"), onChoose });
    $("close-detail").addEventListener("click", () => this.choose(null));
    addEventListener("resize", () => this.redraw());
    const milli = (value) => `${(value * 1000).toFixed(1)} ms`;
    this.charts = [
      new Chart($("charts"), {
        title: "Throughput", write: (point) => `${whole.format(Math.round(point.tokens))} tokens/s`,
        lines: [["generated", "accent", (point) => point.tokens], ["prompts", "amber", (point) => point.prompt]],
      }),
      new Chart($("charts"), {
        title: "Step time", isStacked: true, tell: milli, write: (point) => milli(stepTime(point)),
        lines: [
          ["forward", "accent", (point) => point.forward], ["sample", "blue", (point) => point.sample],
          ["detokenize", "violet", (point) => point.detokenize], ["schedule", "amber", (point) => point.schedule],
        ],
      }),
      new Chart($("charts"), {
        title: "Latency", write: (point) => `${seconds(point.first)} / ${seconds(point.between)}`,
        lines: [["to the first token", "amber", (point) => point.first], ["between tokens", "accent", (point) => point.between]],
      }),
      new Chart($("charts"), {
        title: "KV cache in use", top: 1, write: (point) => `${Math.round(point.usage * 100)} %`,
        lines: [["used", "accent", (point) => point.usage]],
      }),
      new Chart($("charts"), {
        title: "Blocks moved", write: (point) => `${compact.format(point.copied + point.swappedOut + point.swappedIn)} a second`,
        lines: [
          ["copied on write", "danger", (point) => point.copied], ["swapped out", "violet", (point) => point.swappedOut],
          ["swapped in", "blue", (point) => point.swappedIn],
        ],
      }),
      new Chart($("charts"), {
        title: "Requests", write: (point) => `${point.running} / ${point.waiting} / ${point.swapped}`,
        lines: [
          ["running", "accent", (point) => point.running], ["waiting", "amber", (point) => point.waiting],
          ["swapped", "violet", (point) => point.swapped],
        ],
      }),
    ];
  }

  open() {
    if (this.stream) return;
    this.stream = new AbortController();
    this.#follow(this.stream.signal);
  }

  close() {
    this.stream?.abort();
    this.stream = null;
  }

  async #follow(signal) {
    while (!signal.aborted) {
      let clock;
      try {
        const response = await call("v1/engine/events", { signal });
        $("live-status").textContent = "";
        clock = setInterval(() => this.#rest(), REST_MS);
        for await (const event of eventsOf(response)) {
          this.state.apply(event);
          this.redraw();
        }
        $("live-status").textContent = "The server has ended the view; what is shown is how it was. Trying again…";
      } catch (error) {
        if (signal.aborted) return;
        if (this.onRefused(error)) return this.close();
        $("live-status").textContent = `${error.message} What is shown is how it was. Trying again…`;
      } finally {
        clearInterval(clock);
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  #rest() {
    this.state.rest();
    this.redraw();
  }

  choose(number) {
    const was = this.chosen;
    this.chosen = number === was ? null : number;
    $("detail").hidden = this.chosen === null;
    this.redraw();
    if (this.chosen === null && was !== null) document.querySelector(`[data-number="${was}"] button`)?.focus();
  }

  /** With the screen's next frame, however many events come before it. */
  redraw() {
    if (this.isDrawing || $("live").hidden) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.#draw();
    });
  }

  #draw() {
    const { engine, blocks, swap } = this.state;
    if (engine.num_blocks === undefined) return;
    this.#tiles();
    const chosen = this.state.requests.has(this.chosen) ? this.chosen : null;
    this.grid.draw(blocks, engine.num_blocks, chosen, this.state.freshCopies);
    $("grid").setAttribute("aria-label", `Map of ${engine.num_blocks} KV blocks, ${engine.num_free} of them free`);
    $("grid").dataset.free = engine.num_free;
    $("swap-box").hidden = !engine.num_swap_blocks;
    if (engine.num_swap_blocks) {
      $("swap-title").textContent = `Swap pool: ${whole.format(engine.num_swap_blocks - engine.num_swap_free)} of ${whole.format(engine.num_swap_blocks)} blocks hold what was swapped out`;
      this.swapGrid.draw(swap, engine.num_swap_blocks, chosen);
      $("swap-grid").setAttribute("aria-label", `Map of ${engine.num_swap_blocks} swap blocks, ${engine.num_swap_free} of them free`);
    }
    this.#rows();
    this.#detail();
    for (const chart of this.charts) chart.draw(this.state.points);
  }

  #tiles() {
    const state = this.state;
    const engine = state.engine;
    const now = state.now;
    const hits = engine.num_queried_tokens ? `${Math.round((100 * engine.num_hit_tokens) / engine.num_queried_tokens)} %` : "–";
    const tiles = [
      ["Running", state.count("running")], ["Waiting", state.count("waiting")], ["Swapped out", state.count("swapped")],
      ["Tokens/s", compact.format(now.tokens)], ["Step", seconds(stepTime(now))],
      ["Blocks free", whole.format(engine.num_free), `/ ${whole.format(engine.num_blocks)}`], ["Prefix hits", hits],
      ["Gave way", whole.format(engine.num_preempted)], ["Copies on write", whole.format(engine.num_copied_blocks)],
    ];
    $("tiles").replaceChildren(...tiles.map(([name, value, part]) => make("div", {}, make("dt", {}, name),
      make("dd", {}, make("span", {}, String(value)), ...(part ? [" ", make("span", { class: "whole" }, part)] : [])))));
  }

  #rows() {
    const requests = [...this.state.requests.values()]
      .sort((one, other) => ORDER.indexOf(one.status) - ORDER.indexOf(other.status) || one.number - other.number);
    $("no-requests").hidden = requests.length > 0;
    const body = $("requests");
    const known = new Map([...body.children].map((row) => [Number(row.dataset.number), row]));
    const rows = requests.map((request) => this.#row(known.get(request.number) ?? this.#newRow(request.number), request));
    // Rows that stay keep their element, and with it the focus.
    for (const [number, row] of known) if (!this.state.requests.has(number)) row.remove();
    rows.forEach((row, at) => body.children[at] === row || body.insertBefore(row, body.children[at] ?? null));
  }

  #newRow(number) {
    const swatch = make("i", { className: "swatch" });
    const button = make("button", { type: "button", className: "plain" }, swatch, make("span", {}));
    button.addEventListener("click", () => this.choose(number));
    const row = make("tr", {}, make("th", { scope: "row" }, button), ...Array.from({ length: 6 }, () => make("td")));
    row.dataset.number = number;
    return row;
  }

  #row(row, request) {
    const [head, ...cells] = row.children;
    head.querySelector(".swatch").style.background = colourOf(request.number, isDark());
    head.querySelector("span").textContent = `#${request.number}`;
    head.firstChild.setAttribute("aria-pressed", request.number === this.chosen);
    row.className = `is-${request.status}`;
    const blocks = new Set(request.tables.flat()).size;
    const texts = [
      STATES[request.status], seconds(Math.max(0, this.state.engine.now_s - request.arrival_s)), whole.format(request.num_prompt_tokens),
      `${whole.format(request.num_output_tokens)}`, whole.format(blocks), gaveWayShort(request),
    ];
    cells.forEach((cell, at) => (cell.textContent = texts[at]));
    return row;
  }

  #detail() {
    const request = this.chosen === null ? null : this.state.find(this.chosen);
    if (!request) return;
    $("detail-title").textContent = `Request #${request.number}, ${STATES[request.status]}`;
    const facts = [
      ["Id", request.request_id], ["Prompt", `${counted(request.num_prompt_tokens, "token")}, ${whole.format(request.num_cached_tokens)} from the cache`],
      ["Answer", answerSoFar(request)],
      ["First token", request.firstAfter_s ? `after ${seconds(request.firstAfter_s)}` : request.num_output_tokens ? "before this page looked" : "not yet"],
      ["Steps", whole.format(request.num_steps)], ["Gave way", gaveWay(request)],
    ];
    const list = make("dl", { className: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    const pool = request.status === "swapped" ? this.state.swap : this.state.blocks;
    const tables = request.tables.map((table, index) => make("div", {},
      make("h3", {}, request.tables.length > 1 ? `Block table of answer ${index + 1}` : "Block table"),
      make("ol", { className: "table-blocks" }, ...table.map((id) => {
        const isShared = pool.get(id)?.[1] > 1;
        return make("li", { className: isShared ? "is-shared" : "", title: isShared ? "shared" : "" }, String(id));
      }))));
    $("detail-body").replaceChildren(list, make("h3", {}, "Timeline"), this.#timeline(request), ...tables);
  }

  #timeline(request) {
    const start = request.arrival_s;
    const end = request.ended_s ?? this.state.engine.now_s;
    const spans = request.moves.filter(([, status]) => status !== "ended").map(([at, status], index) => {
      const until = request.moves[index + 1]?.[0] ?? end;
      const span = make("li", { className: `is-${status}` }, make("span", {}, `${STATES[status]} ${seconds(Math.max(0, until - at))}`));
      span.style.flexGrow = Math.max(0.02, (until - at) / Math.max(0.001, end - start));
      span.title = span.textContent;
      return span;
    });
    return make("ol", { className: "timeline" }, ...spans);
  }
}

function answerSoFar({ num_answers: answers, num_output_tokens: tokens, max_tokens: most }) {
  if (answers > 1) return `${counted(tokens, "token")} in ${answers} answers of at most ${whole.format(most)} each`;
  return `${whole.format(tokens)} of at most ${counted(most, "token")}`;
}

function gaveWayShort(request) {
  const times = request.num_preempted_swap + request.num_preempted_recompute;
  return times ? `${times} ×` : "–";
}

function gaveWay(request) {
  const parts = [];
  if (request.num_preempted_swap) parts.push(`${request.num_preempted_swap} × swapped`);
  if (request.num_preempted_recompute) parts.push(`${request.num_preempted_recompute} × recomputed`);
  return parts.join(", ") || "never";
}
