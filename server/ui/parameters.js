// The parameters' fields, made from the server's own description of its API: names, ranges, defaults, explanations.

import { $, make } from "./parts.js";

const SHOWN = [
  "max_tokens", "temperature", "n", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
  "seed", "stop", "ignore_eos",
];
const STARTS = { max_tokens: 256 }; // so that an answer ends, even where the model finds no end
const KINDS = { chat: "ChatRequest", completion: "CompletionRequest" };

export class Parameters {
  constructor(description) {
    this.schemas = description.components.schemas;
    this.fields = new Map();
    const properties = this.schemas[KINDS.chat].properties;
    $("parameters").replaceChildren(...SHOWN.filter((name) => name in properties).map((name) => this.#field(name, properties[name])));
    $("reset").addEventListener("click", () => this.reset());
  }

  reset() {
    for (const field of this.fields.values()) field.set(field.start);
  }

  /** What differs from the server's defaults. */
  values(kind) {
    const properties = this.schemas[KINDS[kind]].properties;
    const given = {};
    for (const [name, field] of this.fields) {
      const value = field.get();
      if (value !== null && value !== (properties[name]?.default ?? null)) given[name] = value;
    }
    return given;
  }

  #field(name, property) {
    const shape = (property.anyOf ?? [property]).find((each) => each.type && each.type !== "null") ?? {};
    const start = STARTS[name] ?? property.default ?? null;
    const id = `parameter-${name}`;
    const box = make("div", { className: "field" });
    const label = make("label", { htmlFor: id }, name.replaceAll("_", " "));
    const about = property.description ? make("p", { className: "quiet about", id: `${id}-about` }, property.description) : null;
    let field;
    if (shape.type === "boolean") field = flag(id, box, label, start);
    else if (name === "stop") field = text(id, box, label);
    else field = number(id, box, label, shape, start);
    if (about) {
      box.append(about);
      box.querySelector(`#${id}`).setAttribute("aria-describedby", about.id);
    }
    this.fields.set(name, { ...field, start });
    return box;
  }
}

function flag(id, box, label, start) {
  const input = make("input", { type: "checkbox", id, checked: Boolean(start) });
  box.classList.add("row");
  box.append(label, input);
  return { get: () => input.checked, set: (value) => (input.checked = Boolean(value)) };
}

function text(id, box, label) {
  const input = make("input", { type: "text", id, placeholder: "several: one after the other, with | between" });
  box.append(label, input);
  return { get: () => (input.value ? input.value.split("|") : null), set: () => (input.value = "") };
}

function number(id, box, label, shape, start) {
  const isWhole = shape.type === "integer";
  const low = shape.minimum ?? shape.exclusiveMinimum;
  const high = shape.maximum;
  const step = isWhole ? 1 : 0.05;
  const input = make("input", { type: "number", id, step: isWhole ? 1 : "any", value: start ?? "", placeholder: "none" });
  if (low !== undefined) input.min = low;
  if (high !== undefined) input.max = high;
  const head = make("div", { className: "row" }, label, input);
  box.append(head);
  let slider = null;
  if (low !== undefined && high !== undefined && high - low <= 200) {
    // Where the range is wide, most of it is of no use to a hand: the slider's part of it is stated by the field's own range.
    const most = Math.min(high, isWhole ? 8 : Math.max(2, low + 2));
    slider = make("input", { type: "range", min: low, max: most, step, value: start ?? low, tabIndex: -1 });
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
