// Markdown to elements: headings, paragraphs, lists, quotes, tables, rules and fenced code, by CommonMark's rules and
// GitHub's for tables. HTML is shown as the text it is. Not supported: indented code, underlined headings, reference
// links, and a line without `>` that continues a quote.

import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { renderInline } from "./inline.js";

const MAX_DEPTH = 12; // of quotes and lists within each other
const MAX_COLUMNS = 100;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(?:( +)|$)/;

/** Returns `line` with the tabs of its indentation as spaces. */
function expand(line) {
  if (!/^ *\t/.test(line)) return line;
  let [column, i] = [0, 0];
  for (; line[i] === " " || line[i] === "\t"; i += 1) column += line[i] === "\t" ? 4 - (column % 4) : 1;
  return " ".repeat(column) + line.slice(i);
}

/** Returns `line` without the `width` spaces with which it begins. Later tabs stay: code may need them. */
const strip = (line, width) => (/^ *\t/.test(line.slice(0, width)) ? expand(line) : line).slice(width);

const indentation = (line) => line.length - line.trimStart().length;
const blank = (line) => !line.trim();

function fenceOf(line) {
  const match = FENCE.exec(line);
  return match && !(match[1][0] === "`" && match[2].includes("`")) ? match : null;
}

function itemOf(line) {
  if (RULE.test(line)) return null;
  const match = ITEM.exec(line);
  if (!match) return null;
  const [whole, before, marker, number, spaces = ""] = match;
  const empty = line.length === whole.length;
  const width = before.length + marker.length + (empty || spaces.length > 4 ? 1 : spaces.length);
  return { kind: number === undefined ? marker : marker.at(-1), number, width, empty };
}

/** Returns the cells of a row of a table. */
function cells(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  if (row.endsWith("|") && !row.endsWith("\\|")) row = row.slice(0, -1);
  return row
    .replace(/\\\||\|/g, (bar) => (bar === "|" ? "\n" : "|"))
    .split("\n", MAX_COLUMNS)
    .map((cell) => cell.trim());
}

/** Returns the alignment of each column where `lines[i]` and the line below begin a table, else null. */
function columnsOf(lines, i) {
  if (i + 1 >= lines.length || !lines[i].includes("|") || !/^[\s|:-]*-[\s|:-]*$/.test(lines[i + 1])) return null;
  const marks = cells(lines[i + 1]);
  if (marks.length !== cells(lines[i]).length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => {
    const [left, right] = [mark.startsWith(":"), mark.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : null;
  });
}

/** Returns whether line `i` begins a block that may follow a paragraph without a blank line. */
function interrupts(lines, i, depth) {
  const line = lines[i];
  if (HEADING.test(line) || RULE.test(line) || fenceOf(line)) return true;
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return true;
    const item = itemOf(line);
    if (item && !item.empty && (item.number === undefined || Number(item.number) === 1)) return true;
  }
  return columnsOf(lines, i) !== null;
}

/**
 * Returns the end of the block that begins at line `i`, and how to render it: `{ end, render(parent) }`. `raw`: the lines
 * with their tabs.
 */
function readBlock(lines, raw, i, depth, open) {
  const line = lines[i];
  const fence = fenceOf(line);
  if (fence) return readFence(raw, i, fence, open);
  if (HEADING.test(line)) return { end: i + 1, render: (parent) => renderHeading(line, parent) };
  if (RULE.test(line)) return { end: i + 1, render: (parent) => parent.append(el("hr")) };
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return readQuote(raw, i, depth, open);
    if (itemOf(line)) return readList(lines, raw, i, depth, open);
  }
  const columns = columnsOf(lines, i);
  if (columns) return readTable(lines, i, columns, depth);
  let end = i + 1;
  while (end < lines.length && !blank(lines[end]) && !interrupts(lines, end, depth)) end += 1;
  const text = lines.slice(i, end).map((each) => each.trimStart());
  return { end, paragraph: true, render: (parent) => renderInline(text.join("\n").trimEnd(), parent) };
}

function readFence(lines, i, [, mark, info], open) {
  const indent = indentation(lines[i]);
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  let end = i + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const closed = end < lines.length;
  const code = lines.slice(i + 1, end).map((line) => line.slice(Math.min(indent, indentation(line))));
  const language = info.trim().split(/\s/, 1)[0];
  const finished = closed || !open;
  return { end: closed ? end + 1 : end, render: (parent) => parent.append(codeBlock(code.join("\n"), language, finished)) };
}

function renderHeading(line, parent) {
  const [, marks] = HEADING.exec(line);
  let text = line.trim().slice(marks.length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  if (end === 0 || " \t".includes(text[end - 1])) text = text.slice(0, end).trimEnd();
  // The page has a heading, and each message has one.
  const heading = el(`h${Math.min(6, marks.length + 2)}`, { class: `level-${marks.length}` });
  renderInline(text, heading);
  parent.append(heading);
}

function readQuote(lines, i, depth, open) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(i, end).map((line) => line.replace(QUOTE, ""));
  const render = (parent) => {
    const quote = el("blockquote");
    renderBlocks(inner, quote, depth + 1, open && end === lines.length);
    parent.append(quote);
  };
  return { end, render };
}

/** Returns the lines of the list item that begins at line `i`, without its marker and indentation, and its end. */
function readItem(lines, raw, i, item, depth) {
  const inner = [raw[i].slice(item.width)];
  let end = i + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (blank(line)) {
      if (item.empty && end === i + 1) break; // an item that begins with a blank line has nothing else
      inner.push("");
    } else if (indentation(line) >= item.width) {
      inner.push(strip(raw[end], item.width));
    } else if (blank(lines[end - 1]) || itemOf(line) || interrupts(lines, end, depth)) {
      break;
    } else {
      inner.push(line.trimStart()); // continues a paragraph
    }
  }
  let blanks = 0;
  while (inner.length > 1 && blank(inner.at(-1))) {
    inner.pop();
    blanks += 1;
  }
  return { inner, end: end - blanks, next: end };
}

function readList(lines, raw, i, depth, open) {
  const first = itemOf(lines[i]);
  const items = [];
  let [end, loose] = [i, false];
  for (let next = i; next < lines.length; ) {
    const item = itemOf(lines[next]);
    if (!item || item.kind !== first.kind) break;
    if (next > end) loose = true; // blank lines between two items
    const read = readItem(lines, raw, next, item, depth);
    items.push(read.inner);
    ({ end, next } = read);
  }
  const render = (parent) => {
    const ordered = first.number !== undefined;
    const start = ordered && Number(first.number) !== 1 ? Number(first.number) : null;
    const list = el(ordered ? "ol" : "ul", { start });
    const bodies = items.map((inner, k) => blocksOf(inner, depth + 1, open && end === lines.length && k === items.length - 1));
    const spread = loose || bodies.some((blocks) => blocks.some((block) => block.afterBlank));
    for (const blocks of bodies) {
      const entry = el("li");
      for (const block of blocks) renderBlock(block, entry, !spread);
      checkbox(entry);
      list.append(entry);
    }
    parent.append(list);
  };
  return { end, render };
}

/** Replaces the `[x]` with which a list item begins by a checkbox. */
function checkbox(entry) {
  const holder = entry.firstElementChild?.tagName === "P" ? entry.firstElementChild : entry;
  const text = holder.firstChild;
  const match = text?.nodeType === Node.TEXT_NODE && /^\[([ xX])\] /.exec(text.data);
  if (!match) return;
  text.data = text.data.slice(match[0].length);
  const done = match[1] !== " ";
  holder.prepend(el("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" }), " ");
  entry.classList.add("task");
}

function readTable(lines, i, columns, depth) {
  let end = i + 2;
  while (end < lines.length && !blank(lines[end]) && !interrupts(lines, end, depth)) end += 1;
  const row = (line, tag) => {
    const entries = cells(line).slice(0, columns.length).map((text, k) => {
      const cell = el(tag, { class: columns[k] && `align-${columns[k]}`, scope: tag === "th" ? "col" : null });
      renderInline(text, cell);
      return cell;
    });
    return el("tr", {}, ...entries);
  };
  const render = (parent) => {
    const body = lines.slice(i + 2, end).map((line) => row(line, "td"));
    const table = el("table", {}, el("thead", {}, row(lines[i], "th")), body.length ? el("tbody", {}, ...body) : null);
    parent.append(el("div", { class: "table" }, table)); // which scrolls where the table is too wide
  };
  return { end, render };
}

/** Returns the blocks of `lines`; `open`: the text is still arriving, so that its last block may continue. */
function blocksOf(raw, depth, open) {
  const lines = raw.map(expand);
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (blank(lines[i])) {
      i += 1;
      continue;
    }
    const block = readBlock(lines, raw, i, depth, open);
    block.start = i;
    block.afterBlank = blocks.length > 0 && blank(lines[i - 1]);
    blocks.push(block);
    i = block.end;
  }
  return blocks;
}

function renderBlock(block, parent, tight) {
  if (!block.paragraph || tight) {
    block.render(parent);
    return;
  }
  const paragraph = el("p");
  block.render(paragraph);
  parent.append(paragraph);
}

function renderBlocks(lines, parent, depth, open) {
  for (const block of blocksOf(lines, depth, open)) renderBlock(block, parent, false);
}

const linesOf = (text) => text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd").split("\n");

/** An element that shows a growing Markdown text. An update replaces only the blocks that changed. */
export class MarkdownView {
  constructor() {
    this.element = el("div", { class: "prose" });
    this.shown = []; // { source, node } of each block
  }

  /** Shows `text`. `open`: more is to come. */
  update(text, open = false) {
    const lines = linesOf(text);
    const blocks = blocksOf(lines, 0, open);
    blocks.forEach((block, k) => {
      const last = open && k === blocks.length - 1;
      const source = `${last}${lines.slice(block.start, block.end).join("\n")}`;
      if (this.shown[k]?.source === source) return;
      const fragment = document.createDocumentFragment();
      renderBlock(block, fragment, false);
      const node = fragment.firstChild;
      if (this.shown[k]) this.shown[k].node.replaceWith(node);
      else this.element.append(node);
      this.shown[k] = { source, node };
    });
    for (const { node } of this.shown.splice(blocks.length)) node.remove();
  }
}
