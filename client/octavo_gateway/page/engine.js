// The engine beside the chat: state, block maps, and the tiles with their last minute.

import { BlockMap, KINDS } from "./blocks.js";
import { Sparkline } from "./sparkline.js";

const MOST_CELLS = 600;
const KEPT = 120; // snapshots: a minute
const STALE_AFTER_MS = 6000;

const whole = new Intl.NumberFormat("en");
const oneDigit = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

const rate = (value) => [value < 10 ? oneDigit.format(value) : whole.format(Math.round(value)), ""];
const percent = (value) => [whole.format(Math.round(value * 100)), "%"];
const seconds = (value) =>
  value < 0.995 ? [whole.format(Math.round(value * 1000)), "ms"] : [oneDigit.format(value), "s"];
const sum = (model, name) => model.instances.reduce((all, instance) => all + instance[name], 0);

// `top` is the least that the top of the scale stands for.
const TILES = [
  {
    id: "rate", label: "Tokens per second", top: 1, read: (model) => model.tokens_per_s, write: rate,
    more: (model) => `prompts: ${rate(model.prompt_tokens_per_s)[0]} per second`,
  },
  {
    id: "first-token", label: "Time to first token", top: 0.05, read: (model) => model.first_token_s,
    write: seconds, more: () => "mean of 30 seconds",
  },
  {
    id: "running", label: "Running", top: 1, read: (model) => sum(model, "running"),
    write: (value) => [whole.format(value), ""], more: (model) => `${whole.format(model.preemptions)} preempted so far`,
  },
  {
    id: "waiting", label: "Waiting", top: 1, read: (model) => sum(model, "waiting"),
    write: (value) => [whole.format(value), ""], more: () => "requests in the queue",
  },
  {
    id: "hits", label: "Prefix hits", top: 1, read: (model) => model.prefix_hit_rate, write: percent,
    more: (model) =>
      model.prefix_hit_rate_total === null ? "of prompt tokens" : `${percent(model.prefix_hit_rate_total).join(" ")} since the start`,
  },
  {
    id: "queue", label: "Time in queue", top: 0.01, read: (model) => model.queue_s, write: seconds,
    more: () => "mean of 30 seconds",
  },
];

export class EnginePanel {
  constructor(root) {
    this.find = (id) => root.getElementById(id);
    this.tiles = TILES.map((tile) => this.#tile(tile));
    this.maps = new Map();
    this.history = [];
    this.shown = null;
    this.staleTimer = 0;
  }

  /** `view`: an event of /live. `wanted`: the name of the model that the chat has. */
  show(view, wanted) {
    clearTimeout(this.staleTimer);
    this.staleTimer = setTimeout(() => this.#state("stale", "no news"), STALE_AFTER_MS);
    if (view.error) {
      this.fail(`The engine's numbers are missing: ${view.error}.`);
      return;
    }
    const model = view.models.find((each) => each.name === wanted) ?? view.models[0];
    if (!model) {
      this.fail("The server's metrics name no model. See that custom metrics are on.");
      return;
    }
    this.#notice(null);
    this.#state(model.ready === false ? "stale" : "live", model.ready === false ? "not ready" : "live");
    const key = `${model.name} ${model.version}`;
    if (this.shown !== key) this.history = [];
    this.shown = key;
    this.history.push(model);
    if (this.history.length > KEPT) this.history.shift();
    this.#blocks(model);
    for (const tile of this.tiles) tile.show(model, this.history);
    this.find("tab-rate").textContent = model.tokens_per_s > 0 ? `${rate(model.tokens_per_s)[0]} tok/s` : "";
  }

  fail(message) {
    this.#state("stale", "no numbers");
    this.#notice(message);
  }

  #state(state, text) {
    this.find("state").dataset.state = state;
    this.find("state-text").textContent = text;
  }

  #notice(text) {
    const notice = this.find("engine-notice");
    notice.hidden = text === null;
    notice.textContent = text ?? "";
  }

  #blocks(model) {
    const counted = model.instances.filter((instance) => instance.blocks);
    const names = counted.map((instance) => instance.name);
    if (names.join() !== [...this.maps.keys()].join()) {
      this.maps = new Map(names.map((name) => [name, new BlockMap(names.length > 1 ? name : "")]));
      this.find("maps").replaceChildren(...[...this.maps].flatMap(([name, map]) => labelled(name, map, names.length)));
    }
    const totals = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    let perCell = null;
    for (const { name, blocks } of counted) {
      perCell = this.maps.get(name).show(blocks, Math.floor(MOST_CELLS / counted.length));
      for (const kind of KINDS) totals[kind] += blocks[kind];
    }
    for (const kind of KINDS) {
      const entry = this.find("legend").querySelector(`[data-kind=${kind}]`);
      entry.querySelector("b").textContent = counted.length ? whole.format(totals[kind]) : "–";
    }
    this.find("cell-size").textContent = cellSize(perCell, model.block_size);
  }

  #tile({ id, label, top, read, write, more }) {
    const element = document.createElement("div");
    element.className = "card tile";
    element.id = `tile-${id}`;
    const [name, number, unit, detail] = ["dt", "b", "span", "dd"].map((tag) => document.createElement(tag));
    name.textContent = label;
    const value = document.createElement("dd");
    value.className = "value";
    value.append(number, unit);
    detail.className = "fine";
    const spark = new Sparkline();
    const drawn = document.createElement("dd");
    drawn.className = "drawn";
    drawn.append(spark.element);
    element.append(name, value, drawn, detail);
    this.find("tiles").append(element);
    return {
      show(model, history) {
        const now = read(model);
        [number.textContent, unit.textContent] = now === null ? ["–", ""] : write(now);
        detail.textContent = more(model);
        spark.show(history.map(read), KEPT, top);
      },
    };
  }
}

function labelled(name, map, count) {
  if (count === 1) return [map.element];
  const label = document.createElement("p");
  label.className = "fine";
  label.textContent = name;
  return [label, map.element];
}

function cellSize(perCell, blockSize) {
  if (perCell === null) return "this server does not count them";
  const blocks = perCell === 1 ? "a cell is one block" : `a cell is ${perCell} blocks`;
  return blockSize ? `${blocks}, ${whole.format(perCell * blockSize)} tokens` : blocks;
}
