// Small parts that several views share.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; text is always text, never markup. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A colour of its own for each number: neighbours are far apart on the circle. */
export function colourOf(number, isDark) {
  const hue = (number * 137.508 + 190) % 360;
  return isDark ? `oklch(0.68 0.11 ${hue})` : `oklch(0.66 0.115 ${hue})`;
}

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

/** A colour of the style sheet, as a canvas needs it. */
export const styleColour = (name) => {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
};

export const whole = new Intl.NumberFormat("en");
/** With its noun: "1 token", "1,200 tokens". */
export const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
export const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** Make the canvas as large as it is shown, in the screen's own pixels; returns its context, in CSS pixels. */
export function context(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const drawing = canvas.getContext("2d");
  drawing.setTransform(scale, 0, 0, scale, 0, 0);
  drawing.clearRect(0, 0, width, height);
  return drawing;
}
