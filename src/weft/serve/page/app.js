// The chat page: what is open, what is being answered, and what the keys and buttons do.

import { receive, requestBody } from "./answers.js";
import { ChatStore, addMessage, branch, newChat, onChangeElsewhere, parentOf, showBranch, titleOf } from "./chats.js";
import { listModels } from "./client.js";
import { askForKey, confirmDialog, prepareDialogs, showSettings, showShortcuts } from "./dialogs.js";
import { announce, byId, sends, touch } from "./dom.js";
import { MessageView } from "./messages.js";
import { fillModels } from "./models.js";
import { clear, notify } from "./notices.js";
import { listChats, openSidebar, prepareSidebar, sidebarCovers } from "./sidebar.js";

const OPEN = "weft.open-chat";
const store = new ChatStore(notify);
const input = byId("input");
const log = byId("log");

let chats = store.load();
let chat = null; // the open one
let models = [];
let views = new Map(); // message -> its MessageView
let following = true; // the newest text is kept in sight
const running = new Map(); // id of a chat -> { controller, message } of the answer that arrives

const actions = { regenerate, resend, showBranch: (message) => changeBranch(message) };

// --- The list of chats ---

function refreshList() {
  chats.sort((a, b) => b.updated - a.updated);
  listChats(chats, chat, { open: openChat, rename, remove }, (one) => running.has(one.id));
  document.title = `${titleOf(chat)} · Weft`;
  byId("title").textContent = chat.messages.length ? titleOf(chat) : "";
}

function keep(changed) {
  if (!chats.includes(changed)) chats.unshift(changed);
  store.save(changed);
}

function openChat(opened) {
  chat = opened;
  sessionStorage.setItem(OPEN, chat.id);
  if (sidebarCovers()) openSidebar(false);
  following = true;
  showModels();
  show();
  if (!touch.matches) input.focus();
}

function startChat() {
  const settings = { ...store.settings() };
  if (chat?.settings.model) settings.model = chat.settings.model;
  openChat(newChat(settings));
}

function rename(changed, title) {
  if (title) {
    changed.title = title;
    store.save(changed);
  }
  refreshList();
  byId("chats").querySelectorAll(".chat")[chats.indexOf(changed)]?.focus();
}

async function remove(removed) {
  if (!(await confirmDialog(`Delete the chat “${titleOf(removed)}”?`, "Delete"))) return;
  running.get(removed.id)?.controller.abort();
  store.remove(removed);
  chats = chats.filter((one) => one !== removed);
  announce("Chat deleted");
  if (removed === chat) startChat();
  else refreshList();
}

async function removeAll() {
  const what = chats.length === 1 ? "the one chat" : `all ${chats.length} chats`;
  if (!chats.length || !(await confirmDialog(`Delete ${what} of this browser?`, "Delete all"))) return;
  for (const one of chats) {
    running.get(one.id)?.controller.abort();
    store.remove(one);
  }
  chats = [];
  byId("settings").close();
  startChat();
}

/** Takes over what another tab did to chats, unless an answer arrives here. */
function changedElsewhere(id) {
  if (id !== null && running.has(id)) return;
  const before = chat;
  chats = [...store.load().filter((one) => !running.has(one.id)), ...chats.filter((one) => running.has(one.id))];
  const again = chats.find((one) => one.id === before.id);
  if (again && (id === null || id === before.id)) {
    chat = again;
    show();
  } else if (!again && before.messages.length) {
    startChat(); // it was deleted
  } else {
    chat = again ?? before;
    refreshList();
  }
}

// --- The open chat ---

function show() {
  views = new Map();
  const now = running.get(chat.id);
  const elements = branch(chat).map((message) => {
    const view = new MessageView(chat, message, actions);
    views.set(message, view);
    view.update({ running: message === now?.message, busy: Boolean(now) });
    return view.element;
  });
  byId("messages").replaceChildren(...elements);
  byId("welcome").hidden = elements.length > 0;
  byId("system-line").hidden = !chat.settings.system?.trim();
  showControls();
  refreshList();
  scroll();
}

function showControls() {
  const busy = running.has(chat.id);
  byId("stop").hidden = !busy;
  byId("send").hidden = busy;
  byId("send").disabled = !input.value.trim();
}

function changeBranch(message) {
  showBranch(chat, message);
  keep(chat);
  following = false;
  const at = log.scrollTop;
  show();
  log.scrollTop = at;
  const shown = [...views.keys()].find((one) => one === message);
  views.get(shown)?.element.querySelector(".switcher button:not([disabled])")?.focus();
}

function scroll() {
  if (following) log.scrollTop = log.scrollHeight;
  byId("to-end").hidden = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

// --- Models ---

async function loadModels() {
  try {
    models = await listModels();
    clear("server");
  } catch (error) {
    if (error.status === 401 && (await askForKey(error.message))) return loadModels();
    models = [];
    notify(error.message, "server");
  }
  showModels();
}

function showModels() {
  const { chosen, missing } = fillModels(byId("model"), models, chat.settings.model);
  clear("model");
  if (missing && chosen && chat.messages.length) {
    notify(`${chat.settings.model} is not served any more. ${chosen} will answer.`, "model");
  }
  byId("welcome-model").textContent = chosen ? `${chosen} answers.` : "";
}

function changeSettings(settings) {
  chat.settings = settings;
  const { model, ...rest } = settings;
  store.saveSettings(rest);
  if (chats.includes(chat)) store.save(chat);
  byId("system-line").hidden = !settings.system?.trim();
}

// --- Questions and answers ---

function send() {
  const text = input.value;
  if (!text.trim() || running.has(chat.id)) return;
  input.value = "";
  fit();
  ask(text, branch(chat).at(-1) ?? null);
}

function ask(text, parent) {
  const question = addMessage(chat, parent, "user", text);
  following = true;
  answer(chat, question);
}

function resend(message, text) {
  if (!running.has(chat.id)) ask(text, parentOf(chat, message));
}

/** Answers the question of an answer again. The earlier answer stays beside it, unless it has no text. */
function regenerate(message) {
  if (running.has(chat.id)) return;
  const question = parentOf(chat, message);
  if (!message.content) chat.messages = chat.messages.filter((one) => one !== message);
  following = true;
  answer(chat, question);
}

async function answer(asked, question) {
  const model = byId("model").value;
  asked.settings.model = model;
  const body = requestBody(asked, question, model);
  // "interrupted" is what a page that is closed now leaves behind.
  const message = addMessage(asked, question, "assistant", "", { model, reason: "interrupted" });
  const controller = new AbortController();
  running.set(asked.id, { controller, message });
  keep(asked);
  show();
  announce("The model is answering");
  try {
    const draw = () => {
      if (running.get(asked.id)?.message !== message) return; // it ended meanwhile
      views.get(message)?.update({ running: true, busy: true });
      scroll();
    };
    await receive(message, body, { signal: controller.signal, draw, save: () => store.save(asked) });
  } catch (error) {
    message.reason = error.name === "AbortError" ? "stopped" : null;
    if (error.name !== "AbortError") message.error = { message: error.message, retryAfter: error.retryAfter, status: error.status };
  }
  if (!running.delete(asked.id)) return; // the page is closed
  if (!chats.includes(asked)) return; // deleted meanwhile
  asked.updated = Date.now();
  keep(asked);
  if (asked === chat) showEnd(message);
  else refreshList();
  if (message.error?.status === 401 && (await askForKey(message.error.message)) && asked === chat) regenerate(message);
  else if (message.error?.status === 404) loadModels();
}

/** Shows what an answer that ended was, and what can be done now. */
function showEnd(message) {
  for (const [one, view] of views) {
    if (one !== message && !view.element.classList.contains("editing")) view.showFoot(false, false);
  }
  views.get(message)?.update();
  showControls();
  refreshList();
  scroll();
  announce(message.error ? `Error: ${message.error.message}` : `Answer: ${message.content.slice(0, 2000)}`);
}

function stop() {
  running.get(chat.id)?.controller.abort();
}

function lastOf(role) {
  return branch(chat).findLast((message) => message.role === role);
}

function editLast() {
  const message = lastOf("user");
  if (message && !running.has(chat.id)) views.get(message).edit();
}

// --- Keys and buttons ---

/** Makes the field as high as its text, for browsers without `field-sizing`. */
function fit() {
  if (!CSS.supports("field-sizing", "content")) {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }
  showControls();
}

function onKey(event) {
  const command = (event.ctrlKey || event.metaKey) && !event.altKey;
  const key = event.key.toLowerCase();
  if (document.querySelector("dialog[open]")) return; // which closes with Escape by itself
  if (event.key === "Escape" && sidebarCovers()) byId("close-menu").click();
  else if (event.key === "Escape" && running.has(chat.id)) stop();
  else if (command && event.shiftKey && key === "o") startChat();
  else if (command && event.shiftKey && key === "l" && lastOf("assistant")) regenerate(lastOf("assistant"));
  else if (command && key === "/") showShortcuts();
  else return;
  event.preventDefault();
}

function prepare() {
  prepareDialogs();
  prepareSidebar();
  document.addEventListener("keydown", onKey);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    const plain = !event.shiftKey && !event.ctrlKey && !event.altKey && !event.metaKey && !event.isComposing;
    if (sends(event)) send();
    else if (event.key === "ArrowUp" && !input.value && plain) editLast();
    else return;
    event.preventDefault();
  });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", startChat);
  byId("search").addEventListener("input", refreshList);
  byId("retry").addEventListener("click", loadModels);
  byId("dismiss").addEventListener("click", () => {
    byId("notice").hidden = true;
  });
  byId("help").addEventListener("click", showShortcuts);
  byId("remove-all").addEventListener("click", removeAll);
  const settings = async () => {
    await showSettings(chat.settings, changeSettings);
    if (!models.length) loadModels();
  };
  for (const id of ["open-settings", "system-line"]) byId(id).addEventListener("click", settings);
  byId("model").addEventListener("change", () => {
    changeSettings({ ...chat.settings, model: byId("model").value });
    showModels();
  });
  log.addEventListener("scroll", () => {
    following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    byId("to-end").hidden = following;
  });
  byId("to-end").addEventListener("click", () => {
    following = true;
    scroll();
    input.focus();
  });
  addEventListener("pagehide", () => {
    for (const one of chats) if (running.has(one.id)) store.save(one);
    running.clear(); // what the end of their connections would report is not an error
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && models.length) loadModels(); // adapters may have been loaded
  });
  onChangeElsewhere(changedElsewhere);
}

prepare();
const opened = chats.find((one) => one.id === sessionStorage.getItem(OPEN));
if (opened) openChat(opened);
else startChat();
loadModels();
