// The parameters' fields, made from the server's own list, GET /v1/parameters: names, ranges, defaults, explanations.

import { $, make } from "./parts.js";

const GROUPS = [
  ["", ["max_tokens", "temperature", "n", "seed", "stop"]],
  ["Which tokens may come", ["top_p", "top_k", "min_p", "typical_p"]],
  ["Against repetition", ["repetition_penalty", "presence_penalty", "frequency_penalty"]],
  ["Where it may end", ["min_tokens", "ignore_eos", "include_stop_str_in_output"]],
  ["Best of, and beams", ["best_of", "use_beam_search", "length_penalty", "early_stopping"]],
];
// So that an answer ends, even where the model finds no end, and makes sense, even where the model is small.
const STARTS = { max_tokens: 256, temperature: 0.7 };
const ENDPOINTS = { chat: "/v1/chat/completions", completion: "/v1/completions" };
const BEAM_WIDTH = 4; // where neither n nor best_of says one

export class Parameters {
  constructor(told) {
    this.fieldsOf = Object.fromEntries(Object.entries(ENDPOINTS).map(([kind, path]) => [kind, told.endpoints[path].fields]));
    this.fields = new Map();
    this.groups = GROUPS.map(([title, names]) => this.#group(title, names));
    $("parameters").replaceChildren(...this.groups.map((group) => group.box));
    $("reset").addEventListener("click", () => this.reset());
    $("parameters").addEventListener("input", () => this.#count());
    this.fields.get("use_beam_search").box.addEventListener("change", () => this.#fitToBeams());
  }

  reset() {
    for (const field of this.fields.values()) field.set(field.start);
    this.before = null;
    this.#count();
  }

  /** Only the fields that this kind of request has. */
  show(kind) {
    for (const [name, field] of this.fields) field.box.hidden = !(name in this.fieldsOf[kind]);
    for (const { box, names } of this.groups) box.hidden = !names.some((name) => name in this.fieldsOf[kind]);
  }

  /** What differs from the server's defaults. */
  values(kind) {
    const given = {};
    for (const [name, field] of this.fields) {
      const value = field.get();
      const described = this.fieldsOf[kind][name];
      if (described && value !== null && value !== (described.default ?? null)) given[name] = value;
    }
    return given;
  }

  #group(title, names) {
    const fields = names.map((name) => this.#field(name, this.fieldsOf.chat[name] ?? this.fieldsOf.completion[name]));
    if (!title) return { box: make("div", {}, ...fields), names };
    const count = make("span", { className: "count" });
    const box = make("details", { className: "group" }, make("summary", {}, make("h3", {}, title), count), ...fields);
    return { box, names, count };
  }

  /** How many of a closed group's fields are not as they were at the start. */
  #count() {
    for (const { names, count } of this.groups) {
      if (!count) continue;
      const changed = names.filter((name) => this.fields.get(name).get() !== this.fields.get(name).start).length;
      count.textContent = changed ? `${changed} set` : "";
    }
  }

  /** Beams need temperature 0 and a width: give the fields such values where the reader sees them, and theirs back afterwards. */
  #fitToBeams() {
    const [temperature, n, bestOf] = ["temperature", "n", "best_of"].map((name) => this.fields.get(name));
    if (this.fields.get("use_beam_search").get()) {
      this.before = [temperature.get(), n.get()];
      temperature.set(0);
      if (Math.max(n.get() ?? 1, bestOf.get() ?? 1) < 2) n.set(BEAM_WIDTH);
    } else if (this.before) {
      temperature.set(this.before[0]);
      n.set(this.before[1]);
    }
  }

  #field(name, described) {
    const shapes = (described.anyOf ?? [described]).filter((each) => each.type && each.type !== "null");
    const shape = shapes[0] ?? {};
    const start = STARTS[name] ?? described.default ?? null;
    const id = `parameter-${name}`;
    const box = make("div", { className: "field" });
    const label = make("label", { htmlFor: id }, name.replaceAll("_", " "));
    let field;
    if (shapes.some((each) => each.enum)) field = choice(id, box, label, shapes.flatMap(valuesOf));
    else if (shape.type === "boolean") field = flag(id, box, label);
    else if (name === "stop") field = text(id, box, label);
    else field = number(id, box, label, shape);
    if (described.description) {
      const about = make("p", { className: "quiet about", id: `${id}-about` }, described.description);
      box.append(about);
      box.querySelector(`#${id}`).setAttribute("aria-describedby", about.id);
    }
    const own = name === "stop" ? null : start; // none is an empty list there
    field.set(own);
    this.fields.set(name, { ...field, box, start: own });
    return box;
  }
}

/** All that a shape allows, where that can be listed. */
function valuesOf(shape) {
  return shape.enum ?? (shape.type === "boolean" ? [true, false] : []);
}

function flag(id, box, label) {
  const input = make("input", { type: "checkbox", id });
  box.classList.add("row");
  box.append(label, input);
  return { get: () => input.checked, set: (value) => (input.checked = Boolean(value)) };
}

function choice(id, box, label, values) {
  const input = make("select", { id }, ...values.map((value) => make("option", {}, String(value))));
  box.append(make("div", { className: "row" }, label, input));
  return {
    get: () => values.find((value) => String(value) === input.value),
    set: (value) => (input.value = String(value)),
  };
}

function text(id, box, label) {
  const input = make("input", { type: "text", id, placeholder: "several: with | between" });
  box.append(label, input);
  return { get: () => (input.value ? input.value.split("|") : null), set: () => (input.value = "") };
}

function number(id, box, label, shape) {
  const isWhole = shape.type === "integer";
  const step = isWhole ? 1 : 0.05;
  const low = shape.minimum ?? (shape.exclusiveMinimum === undefined ? undefined : shape.exclusiveMinimum + step);
  const high = shape.maximum;
  const input = make("input", { type: "number", id, step: isWhole ? 1 : "any", placeholder: "none" });
  if (shape.minimum !== undefined) input.min = shape.minimum;
  if (high !== undefined) input.max = high;
  box.append(make("div", { className: "row together" }, label, make("span", { className: "range" }, range(shape)), input));
  let slider = null;
  if (low !== undefined && low >= -2 && high !== undefined && high - low <= 200) {
    // Where the range is wide, most of it is of no use to a hand: the slider's part of it is stated by the field's own range.
    const most = Math.min(high, isWhole ? 8 : 2);
    slider = make("input", { type: "range", min: low, max: most, step, tabIndex: -1 });
    slider.setAttribute("aria-hidden", "true"); // the number field beside it says and takes the same
    slider.addEventListener("input", () => (input.value = slider.value));
    input.addEventListener("input", () => (slider.value = input.value));
    box.append(slider);
  }
  return {
    get: () => (input.value === "" || Number.isNaN(input.valueAsNumber) ? null : input.valueAsNumber),
    set: (value) => {
      input.value = value ?? "";
      if (slider) slider.value = value ?? low;
    },
  };
}

/** A range for the eye: "0 to 2", "above 0"; nothing where there is none or its end is only that of a machine's numbers. */
function range({ minimum, exclusiveMinimum, maximum }) {
  const start = minimum ?? exclusiveMinimum;
  if (start === undefined || start < -1e6) return "";
  const isOpen = minimum === undefined;
  if (maximum === undefined || maximum > 1e6) return isOpen ? `above ${start}` : `from ${start}`;
  return `${isOpen ? "above " : ""}${start} to ${maximum}`.replace("-", "−");
}
