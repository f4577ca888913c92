// The engine's state as the events of GET /v1/engine/events add up to it, and what the page remembers beyond it.

const HISTORY_S = 180;
const MAX_ENDED = 40;
const COPIED = 2; // flag of a block
const SHOWN_MS = 2500; // how long a copy is shown: the event that tells of it is the latest for a tenth of a second only
const PARTS = ["schedule", "forward", "sample", "detokenize"]; // of a step

/** A point's whole step, in seconds. */
export const stepTime = (point) => PARTS.reduce((total, part) => total + point[part], 0);

export class EngineState {
  constructor() {
    this.engine = {};
    this.blocks = new Map(); // id -> [owner or null, references, flags]
    this.copied = new Map(); // id -> when it was last copied on write, in milliseconds of the page's clock
    this.swap = new Map();
    this.requests = new Map(); // number -> request; `tables` whole, `moves` [[second, status], …]
    this.ended = []; // the latest first
    this.points = []; // one a second: what the charts show
    this.last = null; // totals and time of the latest point
    this.firsts = []; // how long requests have waited for their first token, since the latest point
    this.heard = 0; // when the latest event came, in milliseconds of the page's clock
  }

  /** Take one event in. */
  apply(event) {
    this.heard = performance.now();
    if (event.kind === "full") {
      this.blocks.clear();
      this.swap.clear();
      const known = new Set(Object.keys(event.requests).map(Number));
      for (const number of [...this.requests.keys()]) if (!known.has(number)) this.#end(number);
      this.last = null;
    }
    merge(this.engine, event.engine ?? {});
    mergeMap(this.blocks, event.blocks ?? {});
    for (const [id, block] of Object.entries(event.blocks ?? {})) if (block?.[2] & COPIED) this.copied.set(Number(id), performance.now());
    mergeMap(this.swap, event.swap ?? {});
    for (const [key, change] of Object.entries(event.requests ?? {})) this.#change(Number(key), change, event.kind === "full");
    this.#measure();
  }

  /** Called about once a second: an engine that rests sends nothing, and its last busy second would go on to be shown. */
  rest() {
    const passed_s = (performance.now() - this.heard) / 1000;
    if (!this.last || this.requests.size || passed_s < 1) return;
    this.heard += passed_s * 1000;
    this.engine.now_s += passed_s;
    this.#measure();
  }

  #change(number, change, isWhole) {
    if (change === null) return this.#end(number);
    const request = this.requests.get(number) ?? { number, tables: [], moves: [] };
    if (change.status && change.status !== request.status) {
      const since = request.moves.length ? this.engine.now_s : change.arrival_s ?? this.engine.now_s;
      if (!request.moves.length && change.status !== "waiting") request.moves.push([since, "waiting"]);
      request.moves.push([request.moves.length ? this.engine.now_s : since, change.status]);
    }
    if (change.num_output_tokens > 0 && request.firstAfter_s === undefined) {
      // Who had begun before this page looked has an age, but nobody here knows when its first token came.
      request.firstAfter_s = isWhole ? null : this.engine.now_s - (change.arrival_s ?? request.arrival_s);
      if (!isWhole) this.firsts.push(request.firstAfter_s);
    }
    const tables = change.tables;
    Object.assign(request, change);
    if (tables) request.tables = isWhole ? tables : tables.map(([kept, more], index) => [...(request.kept?.[index] ?? []).slice(0, kept), ...more]);
    request.kept = request.tables;
    this.requests.set(number, request);
  }

  #end(number) {
    const request = this.requests.get(number);
    if (!request) return;
    this.requests.delete(number);
    this.ended.unshift({ ...request, status: "ended", ended_s: this.engine.now_s, moves: [...request.moves, [this.engine.now_s, "ended"]] });
    this.ended.length = Math.min(this.ended.length, MAX_ENDED);
  }

  find(number) {
    return this.requests.get(number) ?? this.ended.find((each) => each.number === number);
  }

  count(status) {
    let count = 0;
    for (const request of this.requests.values()) count += request.status === status;
    return count;
  }

  /** The ids of blocks that were copied on write a moment ago. */
  get freshCopies() {
    for (const [id, at] of this.copied) if (performance.now() - at > SHOWN_MS) this.copied.delete(id);
    return this.copied;
  }

  get usage() {
    return this.engine.num_blocks ? 1 - this.engine.num_free / this.engine.num_blocks : 0;
  }

  /** The latest point, or zeros. */
  get now() {
    return this.points.at(-1) ?? { tokens: 0, prompt: 0, first: 0, between: 0, schedule: 0, forward: 0, sample: 0, detokenize: 0 };
  }

  #measure() {
    const now = this.engine;
    const before = this.last;
    if (before && now.now_s - before.now_s < 1) return;
    this.last = { ...now };
    if (!before || now.num_steps < before.num_steps) return;
    const spent = now.now_s - before.now_s;
    const steps = Math.max(1, now.num_steps - before.num_steps);
    const sampled = now.num_sampled_tokens - before.num_sampled_tokens;
    const firsts = this.firsts.splice(0);
    this.points.push({
      at: now.now_s,
      // Between the first tokens of two requests, the last one's wait goes on to be shown.
      first: firsts.length ? firsts.reduce((total, each) => total + each, 0) / firsts.length : this.now.first,
      between: sampled ? spent / steps : 0,
      tokens: sampled / spent,
      prompt: Math.max(0, now.num_scheduled_tokens - before.num_scheduled_tokens - sampled) / spent,
      ...Object.fromEntries(PARTS.map((part) => [part, (now[`${part}_s`] - before[`${part}_s`]) / steps])),
      copied: (now.num_copied_blocks - before.num_copied_blocks) / spent,
      swappedOut: (now.num_swapped_out_blocks - before.num_swapped_out_blocks) / spent,
      swappedIn: (now.num_swapped_in_blocks - before.num_swapped_in_blocks) / spent,
      usage: this.usage,
      running: this.count("running"), waiting: this.count("waiting"), swapped: this.count("swapped"),
    });
    while (this.points.length && this.points[0].at < now.now_s - HISTORY_S) this.points.shift();
  }
}

function merge(target, change) {
  for (const [key, value] of Object.entries(change)) target[key] = value;
}

function mergeMap(target, change) {
  for (const [key, value] of Object.entries(change)) {
    if (value === null) target.delete(Number(key));
    else target.set(Number(key), value);
  }
}
