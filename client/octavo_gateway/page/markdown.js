// The part of Markdown that models write, as DOM nodes. Every character of the text goes through textContent.

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=\S)([^*\n]+?)\*/gs;

/** The text's blocks in order: { kind, source, ... }. An open code fence at the end is code all the same. */
export function parse(text) {
  const blocks = [];
  const lines = text.split("\n");
  let at = 0;
  const take = (fits) => {
    const from = at;
    while (at < lines.length && fits(lines[at])) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      at += 1;
      const code = take((inner) => inner.trim() !== fence[1]).join("\n");
      at += 1;
      blocks.push({ kind: "code", language: fence[2], source: code });
    } else if (!line.trim()) {
      at += 1;
    } else if (heading) {
      at += 1;
      blocks.push({ kind: "heading", source: heading[2] });
    } else if (ITEM.test(line)) {
      const ordered = ITEM.exec(line)[1] !== undefined;
      const items = take((inner) => ITEM.test(inner) && (ITEM.exec(inner)[1] !== undefined) === ordered);
      const start = Number(ITEM.exec(line)[1] ?? 1);
      blocks.push({ kind: ordered ? "ordered" : "list", start, source: items.join("\n") });
    } else {
      const prose = take((inner) => inner.trim() && !FENCE.test(inner) && !HEADING.test(inner) && !ITEM.test(inner));
      blocks.push({ kind: "paragraph", source: prose.join("\n") });
    }
  }
  return blocks;
}

/** Makes `element` show the text. Blocks that have not changed since the last call keep their nodes. */
export function render(element, text) {
  const blocks = parse(text);
  blocks.forEach((block, index) => {
    const sign = `${block.kind}:${block.language ?? ""}:${block.start ?? ""}:${block.source}`;
    const old = element.children[index];
    if (old?.octavoSign === sign) return;
    const node = nodeOf(block);
    node.octavoSign = sign;
    if (old) old.replaceWith(node);
    else element.append(node);
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
}

function nodeOf(block) {
  if (block.kind === "code") return codeNode(block);
  if (block.kind === "heading") return withInline(document.createElement("h3"), block.source);
  if (block.kind === "paragraph") return withInline(document.createElement("p"), block.source);
  const list = document.createElement(block.kind === "ordered" ? "ol" : "ul");
  if (block.kind === "ordered") list.start = block.start;
  for (const line of block.source.split("\n")) {
    list.append(withInline(document.createElement("li"), ITEM.exec(line)[2]));
  }
  return list;
}

function codeNode({ language, source }) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const head = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "code";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Select it and copy";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  head.append(name, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  const code = document.createElement("code");
  code.textContent = source;
  pre.append(code);
  figure.append(head, pre);
  return figure;
}

function withInline(element, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    element.append(text.slice(from, match.index));
    const [, , code, strong, emphasis] = match;
    const tag = code !== undefined ? "code" : strong !== undefined ? "strong" : "em";
    const node = document.createElement(tag);
    node.textContent = code ?? strong ?? emphasis;
    element.append(node);
    from = match.index + match[0].length;
  }
  element.append(text.slice(from));
  return element;
}
