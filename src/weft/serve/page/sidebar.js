// The list of chats.

import { byId, el, iconButton } from "./dom.js";
import { titleOf } from "./chats.js";

const wide = matchMedia("(min-width: 56rem)");

/** Shows or hides the list. On a narrow page it covers the chat, which then takes no input. */
export function openSidebar(open) {
  document.body.dataset.sidebar = open ? "open" : "closed";
  byId("sidebar").inert = !open;
  byId("main").inert = open && !wide.matches;
  byId("menu").setAttribute("aria-expanded", String(open));
}

export const sidebarCovers = () => document.body.dataset.sidebar === "open" && !wide.matches;

export function prepareSidebar() {
  openSidebar(wide.matches);
  wide.addEventListener("change", () => openSidebar(wide.matches));
  byId("menu").addEventListener("click", () => {
    openSidebar(document.body.dataset.sidebar !== "open");
    if (sidebarCovers()) byId("new-chat").focus();
  });
  const close = () => {
    openSidebar(false);
    byId("menu").focus();
  };
  byId("shade").addEventListener("click", close);
  byId("close-menu").addEventListener("click", close);
}

/** Lists chats. `actions`: open(chat), rename(chat, title) and remove(chat). `answering(chat)`: an answer arrives. */
export function listChats(chats, current, actions, answering) {
  const wanted = byId("search").value.trim().toLowerCase();
  const has = (chat) =>
    titleOf(chat).toLowerCase().includes(wanted) ||
    chat.messages.some((message) => message.content.toLowerCase().includes(wanted));
  const shown = wanted ? chats.filter(has) : chats;
  byId("search").hidden = chats.length < 2 && !wanted;
  byId("chats").replaceChildren(...shown.map((chat) => entry(chat, chat === current, actions, answering(chat))));
  const none = wanted ? "No chat has these words." : "No chats yet. They are kept in this browser only.";
  byId("no-chats").textContent = shown.length ? "" : none;
}

function entry(chat, current, actions, answering) {
  const title = titleOf(chat);
  const open = el("button", { type: "button", class: "chat", "aria-current": current ? "true" : null, title }, title);
  open.addEventListener("click", () => actions.open(chat));
  const item = el(
    "li",
    { class: answering ? "answering" : null },
    open,
    iconButton("edit", `Rename ${title}`, () => rename(chat, item, actions)),
    iconButton("delete", `Delete ${title}`, () => actions.remove(chat)),
  );
  if (answering) open.append(el("span", { class: "visually-hidden" }, " (answering)"));
  return item;
}

function rename(chat, item, actions) {
  const field = el("input", { class: "field", "aria-label": "Title of the chat", maxlength: 200 });
  field.value = titleOf(chat);
  let done = false;
  const finish = (title) => {
    if (done) return; // removing the field takes its focus
    done = true;
    actions.rename(chat, title);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(field.value.trim());
    if (event.key === "Escape") finish(null);
    event.stopPropagation();
  });
  field.addEventListener("blur", () => finish(field.value.trim()));
  item.replaceChildren(field);
  field.select();
}
