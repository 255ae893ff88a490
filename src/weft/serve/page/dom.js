// The page's elements. Text enters the document as text nodes only: no function of this page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Returns a new element. `properties`: attributes by name, and `on`: listeners by event. Children: nodes or strings. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Returns the icon whose symbol in index.html has the id `icon-NAME`. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** Returns a button that shows an icon and has `label` as its name and tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  const all = { type: "button", class: "icon-button", "aria-label": label, title: label, ...properties };
  return el("button", { ...all, on: { click: onclick } }, icon(name));
}

/** Returns the element of index.html with this id. */
export const byId = (id) => document.getElementById(id);

export const touch = matchMedia("(pointer: coarse)");

/** Returns whether a key sends the message. On a phone, Enter begins a new line. */
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && (!touch.matches || event.ctrlKey || event.metaKey);
}

/** Tells a screen reader `text`, without showing it. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Copies `text`. Pages of plain HTTP from another machine have no clipboard API: they copy a selection. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = el("textarea", { class: "visually-hidden", readonly: true });
  field.value = text;
  // Within an open dialog nothing outside of it can have the focus.
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  const focused = document.activeElement;
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser does not allow this page to copy");
}

/** Returns a button that copies what `text()` returns, and says so. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    let outcome = "Copied";
    try {
      await copyText(text());
    } catch (error) {
      outcome = `Not copied: ${error.message}`;
    }
    announce(outcome);
    button.replaceChildren(icon(outcome === "Copied" ? "check" : "alert"));
    button.title = outcome;
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = label;
    }, 1500);
  });
  return button;
}
