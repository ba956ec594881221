// The block map: cells whose number of each kind follows the counts. Which block is which is not known here.

export const KINDS = ["shared", "referenced", "cached", "free"];

/**
 * How many cells of each kind: { perCell, cells: { shared, referenced, cached, free } }, at most `most` in all.
 * A kind that there is has one cell at least.
 */
export function share(blocks, most) {
  const perCell = Math.max(1, Math.ceil(blocks.total / most));
  const total = Math.ceil(blocks.total / perCell);
  const cells = {};
  for (const kind of KINDS) {
    cells[kind] = blocks[kind] > 0 ? Math.max(1, Math.round(blocks[kind] / perCell)) : 0;
  }
  // Rounding leaves a few too many or too few: the largest kind takes them, where it shows least.
  const largest = KINDS.reduce((best, kind) => (cells[kind] > cells[best] ? kind : best));
  cells[largest] += total - KINDS.reduce((sum, kind) => sum + cells[kind], 0);
  return { perCell, cells };
}

/** The map of one instance. */
export class BlockMap {
  constructor(name) {
    this.element = document.createElement("div");
    this.element.className = "map";
    this.element.setAttribute("role", "img");
    this.name = name;
  }

  show(blocks, most) {
    const { perCell, cells } = share(blocks, most);
    const kinds = KINDS.flatMap((kind) => Array(cells[kind]).fill(kind));
    while (this.element.children.length > kinds.length) this.element.lastElementChild.remove();
    while (this.element.children.length < kinds.length) this.element.append(document.createElement("i"));
    kinds.forEach((kind, index) => {
      const cell = this.element.children[index];
      const name = `cell ${kind}`;
      if (cell.className !== name) cell.className = name;
    });
    this.element.classList.toggle("roomy", kinds.length <= 150);
    const parts = KINDS.map((kind) => `${blocks[kind]} ${kind}`).join(", ");
    const of = this.name ? ` of ${this.name}` : "";
    this.element.setAttribute("aria-label", `KV blocks${of}: ${parts}, of ${blocks.total}`);
    return perCell;
  }
}
