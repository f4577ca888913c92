// A pool's blocks as a grid on a canvas: one cell a block, coloured by the request that holds it.

import { colourOf, context, isDark, styleColour } from "./parts.js";

const CACHED = 1;
const NONE = new Map();
const GAP = 2;

export class BlockGrid {
  constructor(canvas, { note, onChoose }) {
    this.canvas = canvas;
    this.note = note;
    this.blocks = new Map();
    this.copies = NONE; // ids of blocks that were copied on write a moment ago
    this.numBlocks = 0;
    this.cursor = -1;
    this.chosen = null; // a request's number: the others' cells step back
    canvas.addEventListener("pointermove", (event) => this.#point(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.#point(-1));
    canvas.addEventListener("click", (event) => onChoose(this.blocks.get(this.#at(event))?.[0] ?? null));
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
      if (move) this.#point(Math.max(0, Math.min(this.numBlocks - 1, this.cursor + move)));
      else if (event.key === "Enter") onChoose(this.blocks.get(this.cursor)?.[0] ?? null);
      else return;
      event.preventDefault();
    });
  }

  /** How large a cell is follows from how many there are: all of them are shown, down to 5 pixels each. */
  #measure() {
    const width = this.canvas.clientWidth || 300;
    const area = Math.min(260, 100 + this.numBlocks / 4) * width;
    this.size = Math.max(5, Math.min(24, Math.floor(Math.sqrt(area / Math.max(1, this.numBlocks)))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    return [width, Math.ceil(this.numBlocks / this.columns) * this.size];
  }

  draw(blocks, numBlocks, chosen, copies = NONE) {
    Object.assign(this, { blocks, numBlocks, chosen, copies });
    const drawing = context(this.canvas, ...this.#measure());
    const side = this.size - (this.size > 8 ? GAP : 1);
    const free = styleColour("cell"), cached = styleColour("cached"), ink = styleColour("ink"), copied = styleColour("copied");
    const dark = isDark();
    for (let id = 0; id < numBlocks; id++) {
      const x = (id % this.columns) * this.size, y = Math.floor(id / this.columns) * this.size;
      const block = blocks.get(id);
      drawing.globalAlpha = 1;
      if (!block || (block[0] === null && !(block[2] & CACHED))) drawing.fillStyle = free;
      else if (block[0] === null) drawing.fillStyle = cached;
      else {
        drawing.fillStyle = colourOf(block[0], dark);
        if (chosen !== null && block[0] !== chosen) drawing.globalAlpha = 0.28;
      }
      drawing.beginPath();
      drawing.roundRect(x, y, side, side, Math.min(3, side / 4));
      drawing.fill();
      if (block?.[1] > 1) this.#dot(drawing, x, y, side, ink);
      if (copies.has(id)) this.#ring(drawing, x, y, side, copied);
      if (id === this.cursor) this.#ring(drawing, x, y, side, ink);
    }
    drawing.globalAlpha = 1;
  }

  #dot(drawing, x, y, side, colour) {
    drawing.fillStyle = colour;
    drawing.beginPath();
    drawing.arc(x + side / 2, y + side / 2, Math.max(1, side / 6), 0, 7);
    drawing.fill();
  }

  #ring(drawing, x, y, side, colour) {
    drawing.strokeStyle = colour;
    drawing.lineWidth = 1.5;
    drawing.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5);
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const id = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    return column < this.columns && id < this.numBlocks ? id : -1;
  }

  #point(id) {
    if (id === this.cursor) return;
    this.cursor = id;
    this.note.textContent = id < 0 ? "Point at a block, or walk with the arrow keys." : this.describe(id);
    this.draw(this.blocks, this.numBlocks, this.chosen, this.copies);
  }

  describe(id) {
    const block = this.blocks.get(id);
    if (!block) return `Block ${id}: free`;
    const [owner, references, flags] = block;
    const parts = [owner === null ? "free" : `held by request ${owner}`];
    if (references > 1) parts.push(`shared, ${references} references`);
    if (flags & CACHED) parts.push("content cached");
    if (this.copies.has(id)) parts.push("just copied on write");
    return `Block ${id}: ${parts.join(", ")}`;
  }
}
