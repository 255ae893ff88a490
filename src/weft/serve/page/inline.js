// Markdown within a paragraph: emphasis, code, links, line breaks. The rules are CommonMark's (delimiter runs and a stack
// of brackets), without HTML and reference links, and with strikethrough. All loops are linear in the length of the
// text or bounded by a constant, because a model's text is shown again and again while it arrives.

import { el } from "./dom.js";

const MAX_DEPTH = 20; // of elements within each other: deeper documents make browsers slow
const PLAIN = /[^\\`*_~[\]!<&\nhH]+/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const ENTITY = /&(?:(amp|lt|gt|quot|nbsp)|#(\d{1,7})|#[xX]([\da-fA-F]{1,6}));/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0" };
const BREAK = /<br\s{0,3}\/?>/iy;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy;
const BARE_LINK = /https?:\/\/[^\s<>`*]{1,2000}/iy;
const LINE_END = /\n[ \t]*/y;
const TITLE = /[ \t\n]{1,20}(?:"[^"]{0,500}"|'[^']{0,500}')/y;
const WHITE = /\s/u;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** Returns `address` as a browser normalizes it where it is a link that may be opened, else null. */
export function safeAddress(address) {
  let url;
  try {
    url = new URL(address); // without a base: relative addresses would open pages of this server
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

function link(href, ...children) {
  return el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

const sticky = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

/** Returns the text of a link's `(address "title")` from `at`, and the position behind it, or null. */
function linkTarget(text, at) {
  let [i, open] = [at + 1, 0];
  const limit = i + 2000;
  while (text[i] === " " || text[i] === "\n") i += 1;
  const start = i;
  const angle = text[i] === "<";
  if (angle) {
    i += 1;
    while (i < limit && i < text.length && !"<>\n".includes(text[i])) i += 1;
    if (text[i] !== ">") return null;
    i += 1;
  }
  for (; !angle && i < limit && i < text.length && !WHITE.test(text[i]); i += 1) {
    if (text[i] === "\\" && /[()\\]/.test(text[i + 1] ?? "")) i += 1;
    else if (text[i] === "(" && (open += 1) > 8) return null;
    else if (text[i] === ")" && (open -= 1) < 0) break;
  }
  let address = angle ? text.slice(start + 1, i - 1) : text.slice(start, i);
  address = address.replace(/\\([!-/:-@[-`{-~])/g, "$1");
  const title = sticky(TITLE, text, i);
  if (title) i += title[0].length;
  while (text[i] === " " || text[i] === "\n") i += 1;
  return text[i] === ")" ? { address, end: i + 1 } : null;
}

/** The state of one call of `renderInline`. */
class Parser {
  constructor(text, parent) {
    this.text = text;
    this.at = 0;
    this.parent = parent;
    this.delimiters = []; // runs of * _ ~ that may become emphasis: { node, mark, count, length, opens, closes }
    this.brackets = []; // open [ and ![: { node, image, delimiters: how many there were before }
    this.depths = new Map();
    this.backticks = null; // starts of backtick runs by their length, the next ones last
  }

  add(node) {
    this.parent.append(node);
    return node;
  }

  run() {
    const { text } = this;
    while (this.at < text.length) {
      const plain = sticky(PLAIN, text, this.at);
      if (plain) this.take(plain[0]);
      else this.special(text[this.at]);
    }
    this.emphasize(0);
    this.parent.normalize();
  }

  /** Adds a line break in place of the end of a line and the spaces around it. */
  lineBreak() {
    const last = this.parent.lastChild;
    if (last?.nodeType === Node.TEXT_NODE) last.data = last.data.trimEnd();
    this.at += sticky(LINE_END, this.text, this.at)[0].length;
    if (this.at < this.text.length) this.add(el("br"));
  }

  special(character) {
    const { text } = this;
    let match;
    if (character === "\n") {
      this.lineBreak();
    } else if (character === "h" || character === "H") {
      if (!this.bareLink()) this.take(character);
    } else if (character === "\\") {
      if ((match = sticky(ESCAPED, text, this.at))) this.take(match[0], match[1]);
      else if (text[this.at + 1] === "\n") this.at += 1;
      else this.take("\\");
    } else if (character === "`") {
      this.code();
    } else if ("*_~".includes(character)) {
      this.delimiter(character);
    } else if (character === "!" || character === "[") {
      this.openBracket(character === "!");
    } else if (character === "]") {
      this.closeBracket();
    } else if ((match = sticky(BREAK, text, this.at))) {
      this.take(match[0], el("br"));
    } else if ((match = sticky(ANGLE_LINK, text, this.at)) && safeAddress(match[1])) {
      this.take(match[0], link(safeAddress(match[1]), match[1]));
    } else if ((match = sticky(ENTITY, text, this.at))) {
      const number = match[2] ? Number(match[2]) : parseInt(match[3], 16);
      const valid = number > 0 && number <= 0x10ffff;
      this.take(match[0], match[1] ? ENTITIES[match[1]] : valid ? String.fromCodePoint(number) : "\ufffd");
    } else {
      this.take(character);
    }
  }

  take(source, node = source) {
    this.at += source.length;
    return this.add(node);
  }

  code() {
    const { text } = this;
    if (!this.backticks) {
      this.backticks = new Map();
      for (const run of text.matchAll(/`+/g)) {
        const { length } = run[0];
        if (!this.backticks.has(length)) this.backticks.set(length, []);
        this.backticks.get(length).push(run.index);
      }
      for (const starts of this.backticks.values()) starts.reverse();
    }
    const run = sticky(/`+/y, text, this.at)[0];
    const starts = this.backticks.get(run.length) ?? []; // an escaped backtick shortens the run behind it
    while (starts.length && starts.at(-1) <= this.at) starts.pop();
    if (!starts.length) {
      this.take(run);
      return;
    }
    let content = text.slice(this.at + run.length, starts.at(-1)).replaceAll("\n", " ");
    if (content.startsWith(" ") && content.endsWith(" ") && content.trim()) content = content.slice(1, -1);
    this.at = starts.at(-1) + run.length;
    this.add(el("code", {}, content));
  }

  delimiter(mark) {
    const { text } = this;
    let end = this.at;
    while (text[end] === mark) end += 1;
    const count = end - this.at;
    // A character beyond 16 bits is two of a string's.
    const before = this.at === 0 ? "\n" : [...text.slice(Math.max(0, this.at - 2), this.at)].at(-1);
    const after = end === text.length ? "\n" : String.fromCodePoint(text.codePointAt(end));
    const left = !WHITE.test(after) && (!PUNCTUATION.test(after) || WHITE.test(before) || PUNCTUATION.test(before));
    const right = !WHITE.test(before) && (!PUNCTUATION.test(before) || WHITE.test(after) || PUNCTUATION.test(after));
    const node = this.add(document.createTextNode(mark.repeat(count)));
    this.at = end;
    if (mark === "~" && count !== 2) return;
    const opens = left && (mark !== "_" || !right || PUNCTUATION.test(before));
    const closes = right && (mark !== "_" || !left || PUNCTUATION.test(after));
    if (opens || closes) this.delimiters.push({ node, mark, count, length: count, opens, closes });
  }

  openBracket(image) {
    if (image && this.text[this.at + 1] !== "[") {
      this.take("!");
      return;
    }
    const node = this.add(document.createTextNode(image ? "![" : "["));
    this.at += image ? 2 : 1;
    this.brackets.push({ node, image, delimiters: this.delimiters.length });
  }

  closeBracket() {
    const open = this.brackets.pop();
    const target = open && this.text[this.at + 1] === "(" ? linkTarget(this.text, this.at + 1) : null;
    const href = target && safeAddress(target.address);
    if (!target) {
      this.take("]");
      return;
    }
    this.emphasize(open.delimiters);
    // An image is a link to it: the page loads nothing from elsewhere. An address that may not be opened leaves its text.
    const element = href ? link(href) : el("span", { class: "no-link", title: `Not a web address: ${target.address}` });
    this.wrap(open.node, null, element);
    open.node.remove();
    if (!element.hasChildNodes()) element.append(target.address);
    this.at = target.end;
    // No link within a link.
    if (!open.image) this.brackets = this.brackets.filter((outer) => outer.image);
  }

  /** Moves the nodes between `first` and `last` into `element`; returns false where that would be too deep. */
  wrap(first, last, element) {
    const depthOf = (node) => this.depths.get(node) ?? 0;
    let depth = 0;
    for (let node = first.nextSibling; node !== last; node = node.nextSibling) depth = Math.max(depth, depthOf(node));
    if (depth >= MAX_DEPTH) return false;
    this.depths.set(element, depth + 1);
    while (first.nextSibling !== last) element.append(first.nextSibling);
    first.after(element);
    return true;
  }

  /** Turns the delimiters from index `bottom` on into emphasis, as CommonMark's "process emphasis" does. */
  emphasize(bottom) {
    const runs = this.delimiters.splice(bottom);
    const open = []; // indexes of runs that may still open
    const barren = new Map(); // kind of a closing run -> number of `open` below which no run matches it
    for (const [index, closer] of runs.entries()) {
      while (closer.closes && closer.count) {
        const kind = `${closer.mark}${closer.opens}${closer.length % 3}`;
        const floor = barren.get(kind) ?? 0;
        let k = open.length - 1;
        while (k >= floor && !matches(runs[open[k]], closer)) k -= 1;
        if (k < floor) {
          barren.set(kind, open.length);
          break;
        }
        open.length = k + 1;
        const opener = runs[open[k]];
        const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
        const tag = closer.mark === "~" ? "s" : used === 2 ? "strong" : "em";
        if (!this.wrap(opener.node, closer.node, el(tag))) return;
        for (const run of [opener, closer]) {
          run.count -= used;
          run.node.data = run.mark.repeat(run.count);
        }
        if (!opener.count) open.pop();
        for (const [other, value] of barren) barren.set(other, Math.min(value, open.length));
      }
      if (closer.opens && closer.count) open.push(index);
    }
  }

  /** Adds a web address that stands in the text; returns whether one does. */
  bareLink() {
    const { text } = this;
    if (/\w/.test(text[this.at - 1] ?? " ")) return false;
    const match = sticky(BARE_LINK, text, this.at);
    if (!match) return false;
    let address = match[0];
    let open = 0;
    for (const character of address) open += character === "(" ? 1 : character === ")" ? -1 : 0;
    // Punctuation behind an address, and a parenthesis that was opened before it, are not its own.
    for (;;) {
      const last = address.at(-1);
      if (last === ")" && open < 0) open += 1;
      else if (!".,;:!?'\"_~]}".includes(last)) break;
      address = address.slice(0, -1);
    }
    const href = safeAddress(address);
    if (!href) return false;
    this.take(address, this.brackets.length ? address : link(href, address));
    return true;
  }
}

function matches(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  const both = opener.closes || closer.opens;
  const sum = opener.length + closer.length;
  return !(both && sum % 3 === 0 && (opener.length % 3 !== 0 || closer.length % 3 !== 0));
}

/** Appends the nodes of the Markdown `text` of a paragraph to `parent`. */
export function renderInline(text, parent) {
  new Parser(text, parent).run();
}
