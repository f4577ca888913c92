// Small line charts of the last minutes.

import { context, make, styleColour } from "./parts.js";

const HEIGHT = 96;

export class Chart {
  /**
   * `lines`: [[name, colour of the style sheet, point => number]]; stacked lines are drawn as areas, each on the one before.
   * `tell` writes a line's latest value beside its name; without it, only the names are there.
   */
  constructor(box, { title, lines, write, tell = null, top = null, isStacked = false }) {
    Object.assign(this, { title, lines, write, tell, top, isStacked });
    this.canvas = make("canvas", { className: "chart", role: "img" });
    this.value = make("span", { className: "chart-value" });
    const names = lines.length > 1 ? lines.map(([name, colour]) => {
      const sign = make("i", { className: "line" });
      sign.style.background = `var(--${colour})`;
      return make("span", { className: "quiet line-name" }, sign, make("span", {}, name));
    }) : [];
    this.names = names.map((each) => each.lastChild);
    box.append(make("figure", {}, make("figcaption", {}, make("h3", {}, title), this.value), this.canvas, make("div", { className: "line-names" }, ...names)));
  }

  draw(points, mostSeconds = 180, leastSeconds = 30) {
    const width = this.canvas.clientWidth || 280;
    const drawing = context(this.canvas, width, HEIGHT);
    const series = this.#series(points);
    const most = this.top ?? Math.max(1e-9, ...series.flat()) * 1.15;
    const end = points.at(-1)?.at ?? 0;
    // The first minutes stretch over the whole width instead of leaving it empty.
    const seconds = Math.max(leastSeconds, Math.min(mostSeconds, end - (points[0]?.at ?? 0)));
    const x = (point) => width - ((end - point.at) / seconds) * width;
    const y = (value) => HEIGHT - 1 - (value / most) * (HEIGHT - 6);
    drawing.strokeStyle = styleColour("edge");
    for (const share of [0, 0.5, 1]) {
      const height = Math.round(y(most * share)) + 0.5;
      drawing.beginPath();
      drawing.moveTo(0, height);
      drawing.lineTo(width, height);
      drawing.stroke();
    }
    for (let index = series.length - 1; index >= 0; index--) {
      const colour = styleColour(this.lines[index][1]);
      drawing.beginPath();
      points.forEach((point, at) => drawing.lineTo(x(point), y(series[index][at])));
      drawing.strokeStyle = drawing.fillStyle = colour;
      drawing.lineWidth = 1.75;
      drawing.lineJoin = "round";
      if (points.length > 1) drawing.stroke();
      if (points.length > 1 && (this.isStacked || this.lines.length === 1)) {
        drawing.lineTo(width, HEIGHT);
        drawing.lineTo(x(points[0]), HEIGHT);
        if (this.isStacked) {
          // The areas lie one within the other: each covers what the larger ones have painted there.
          drawing.fillStyle = styleColour("sheet");
          drawing.fill();
          drawing.fillStyle = colour;
        }
        drawing.globalAlpha = this.isStacked ? 0.35 : 0.12;
        drawing.fill();
        drawing.globalAlpha = 1;
      }
    }
    this.value.textContent = points.length ? this.write(points.at(-1)) : "–";
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.value.textContent}`);
    if (this.tell && points.length) {
      this.names.forEach((name, at) => (name.textContent = `${this.lines[at][0]} ${this.tell(this.lines[at][2](points.at(-1)))}`));
    }
  }

  #series(points) {
    const series = this.lines.map(([, , read]) => points.map(read));
    if (this.isStacked) {
      for (let index = 1; index < series.length; index++) series[index] = series[index].map((value, at) => value + series[index - 1][at]);
    }
    return series;
  }
}
