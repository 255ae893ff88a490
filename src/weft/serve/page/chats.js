// Chats and where they are kept: one entry of the browser's storage for each chat.
//
// The messages of a chat are a tree: an edited message or another answer is a new branch beside the old one, so that
// nothing is lost. `chat.leaf` is the last message of the branch that is shown.

const PREFIX = "weft.chat.";
const SETTINGS = "weft.settings";

/** Returns a random id. (`crypto.randomUUID` is missing on pages of plain HTTP from another machine.) */
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

/** Returns a chat without messages. It is kept from its first message on. */
export function newChat(settings) {
  const now = Date.now();
  return { version: 1, id: randomId(), title: null, created: now, updated: now, settings: { ...settings }, messages: [], leaf: null };
}

/** Adds a message behind `parent` (null: the first of a branch) and shows its branch. */
export function addMessage(chat, parent, role, content, rest = {}) {
  const message = { id: randomId(), parent: parent?.id ?? null, role, content, ...rest };
  chat.messages.push(message);
  chat.leaf = message.id;
  chat.updated = Date.now();
  return message;
}

const find = (chat, id) => chat.messages.find((message) => message.id === id) ?? null;

export const parentOf = (chat, message) => find(chat, message.parent);

/** Returns the messages of the branch that is shown, the first one first. */
export function branch(chat) {
  const messages = [];
  for (let message = find(chat, chat.leaf); message; message = find(chat, message.parent)) messages.push(message);
  return messages.reverse();
}

/** Returns a message and its alternatives, in the order of their creation. */
export const alternatives = (chat, message) => chat.messages.filter((other) => other.parent === message.parent);

/** Shows the branch of a message, with the newest messages behind it. */
export function showBranch(chat, message) {
  let leaf = message;
  for (let next = leaf; next; next = chat.messages.findLast((other) => other.parent === leaf.id)) leaf = next;
  chat.leaf = leaf.id;
}

/** Returns the title that the user gave, or the beginning of the first message. */
export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content.trim().replace(/\s+/g, " ");
  if (chat.title || !first) return chat.title || "New chat";
  const characters = [...first.slice(0, 200)];
  return characters.length > 60 ? `${characters.slice(0, 60).join("").trimEnd()}…` : first;
}

/** Returns the messages for a request: of the branch up to `last`, with the system prompt, without failed answers. */
export function requestMessages(chat, last) {
  const messages = [];
  const shown = branch({ ...chat, leaf: last.id }).filter((message) => message.role === "user" || message.content);
  for (const { role, content } of shown) {
    // Chat templates want roles that alternate: a question without an answer is joined with the next one.
    if (messages.at(-1)?.role === role) messages.at(-1).content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  const system = chat.settings.system?.trim();
  return system ? [{ role: "system", content: chat.settings.system }, ...messages] : messages;
}

/** Returns whether `value` has the form of a chat; parents come before their children, so that branches end. */
function isChat(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages) || typeof value.settings !== "object") return false;
  const known = new Set([null]);
  return value.messages.every((message) => {
    const valid = known.has(message?.parent) && typeof message.id === "string" && typeof message.content === "string";
    known.add(message?.id);
    return valid && ["user", "assistant"].includes(message.role);
  });
}

/** Chats and settings in the browser's storage. `report` is called with words where they cannot be kept or read. */
export class ChatStore {
  constructor(report) {
    this.report = report;
  }

  /** Returns all chats, the one that changed last first. */
  load() {
    const chats = [];
    let damaged = 0;
    try {
      for (const key of Object.keys(localStorage)) {
        if (!key.startsWith(PREFIX)) continue;
        const chat = parse(localStorage.getItem(key));
        if (isChat(chat)) chats.push(chat);
        else damaged += 1;
      }
    } catch (error) {
      this.report(`Chats cannot be kept: this browser gives the page no storage (${error.message}).`);
    }
    if (damaged) this.report(`${damaged} chat(s) in the browser's storage cannot be read. They are left as they are.`);
    return chats.sort((a, b) => b.updated - a.updated);
  }

  /** Returns the chat with this id as another tab left it, or null. */
  read(id) {
    const chat = parse(localStorage.getItem(PREFIX + id));
    return isChat(chat) ? chat : null;
  }

  save(chat) {
    this.write(PREFIX + chat.id, chat);
  }

  remove(chat) {
    localStorage.removeItem(PREFIX + chat.id);
  }

  /** Returns the settings of new chats. */
  settings() {
    try {
      return parse(localStorage.getItem(SETTINGS)) ?? {};
    } catch {
      return {}; // no storage: `load` has reported it
    }
  }

  saveSettings(settings) {
    this.write(SETTINGS, settings);
  }

  write(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch (error) {
      const full = error.name === "QuotaExceededError";
      const what = full ? "the browser's storage is full; delete chats that you do not need" : error.message;
      this.report(`The latest messages are not kept: ${what}.`);
    }
  }
}

/** Calls `listener(id)` after another tab changed or deleted a chat. */
export function onChangeElsewhere(listener) {
  addEventListener("storage", (event) => {
    if (event.key === null) listener(null);
    else if (event.key.startsWith(PREFIX)) listener(event.key.slice(PREFIX.length));
  });
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
