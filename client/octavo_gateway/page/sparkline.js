// A line of the last minute, as inline SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 28;

export class Sparkline {
  constructor() {
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("class", "spark");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.area = this.#path("spark-area");
    this.line = this.#path("spark-line");
  }

  /** `values` from old to new, null where there is none; `length` of them fill the width. `top` is the scale's least end. */
  show(values, length, top) {
    const most = Math.max(top, ...values.map((value) => value ?? 0));
    const left = WIDTH - ((values.length - 1) * WIDTH) / (length - 1);
    const x = (index) => (left + (index * WIDTH) / (length - 1)).toFixed(1);
    const y = (value) => (HEIGHT - 1.5 - (value / most) * (HEIGHT - 4)).toFixed(1);
    let line = "";
    let area = "";
    let from = null;
    const close = (index) => {
      if (from !== null) area += `L${x(index)} ${HEIGHT}L${x(from)} ${HEIGHT}Z`;
      from = null;
    };
    values.forEach((value, index) => {
      if (value === null) {
        close(index - 1);
        return;
      }
      const step = `${from === null ? "M" : "L"}${x(index)} ${y(value)}`;
      line += step;
      area += step;
      from ??= index;
    });
    close(values.length - 1);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }

  #path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.element.append(path);
    return path;
  }
}
