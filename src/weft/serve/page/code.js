// Code blocks: the language's name, a button that copies, and colors for comments, strings, numbers and keywords.

import { copyButton, el } from "./dom.js";

const MAX_COLORED = 50_000; // characters; longer code has one color
const WORDS = (text) => new Set(text.split(" "));

const PYTHON = WORDS(
  "and as assert async await break class continue def del elif else except finally for from global if import in is lambda " +
    "match case nonlocal not or pass raise return try while with yield None True False self",
);
const C_LIKE = WORDS(
  "abstract as async await auto bool boolean break case catch char class const constexpr continue default delete do double " +
    "else enum export extends extern false final finally float fn for from func function go goto if impl implements import in " +
    "instanceof int interface let long loop match mod mut namespace new nil null nullptr of override package private protected " +
    "pub public return self short signed sizeof static string struct super switch template this throw trait true try type " +
    "typedef typeof union unsigned unsafe use using var virtual void volatile where while yield undefined",
);
const SHELL = WORDS("if then else elif fi for while until do done case esac in function return local export set source exit");
const SQL = WORDS(
  "select from where and or not insert into values update set delete create table index view drop alter join left right inner " +
    "outer on as group by order having limit offset union all distinct null is in like between case when then else end primary " +
    "key foreign references with",
);

const STRINGS = "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?";
const REST = "(\\b(?:0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)|([A-Za-z_]\\w*)";
const pattern = (comments, strings = STRINGS) => new RegExp(`(${comments})|(${strings})|${REST}`, "g");

const HASH = "#[^\\n]*";
const SLASHES = "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
const STYLES = [
  ["python py python3 ipython", PYTHON, [HASH, `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRINGS}`]],
  ["bash sh shell zsh console", SHELL, [HASH]],
  ["yaml yml toml ini ruby rb r dockerfile makefile", PYTHON, [HASH]],
  ["sql", SQL, ["--[^\\n]*", STRINGS]],
  ["json jsonc json5", WORDS("true false null"), ["//[^\\n]*"]],
  [
    "javascript js jsx typescript ts tsx java c cpp c++ h cs csharp go rust rs kotlin swift scala php dart css scss",
    C_LIKE,
    [SLASHES, `${STRINGS}|\`(?:[^\`\\\\]|\\\\.)*\`?`],
  ],
];

const BY_LANGUAGE = new Map();
for (const [names, keywords, parts] of STYLES) {
  for (const name of names.split(" ")) BY_LANGUAGE.set(name, { keywords, parts, any: name === "sql" });
}

/** Appends `code` to `parent`, with a span for each comment, string, number and keyword of `language`. */
function color(code, language, parent) {
  const style = BY_LANGUAGE.get(language.toLowerCase());
  if (!style || code.length > MAX_COLORED) {
    parent.append(code);
    return;
  }
  let shown = 0;
  for (const match of code.matchAll(pattern(...style.parts))) {
    const [text, comment, string, number, word] = match;
    const keyword = word && style.keywords.has(style.any ? word.toLowerCase() : word);
    const kind = comment ? "comment" : string ? "string" : number ? "number" : keyword ? "keyword" : null;
    if (!kind) continue;
    parent.append(code.slice(shown, match.index), el("span", { class: `code-${kind}` }, text));
    shown = match.index + text.length;
  }
  parent.append(code.slice(shown));
}

/** Returns the element of a code block; `finished`: its last line has arrived. */
export function codeBlock(code, language, finished) {
  const content = el("code", {});
  if (finished) color(code, language, content);
  else content.append(code);
  const head = el(
    "div",
    { class: "code-head" },
    el("span", { class: "language" }, language.slice(0, 40) || "text"),
    copyButton("Copy the code", () => code),
  );
  return el("div", { class: "code" }, head, el("pre", {}, content));
}
