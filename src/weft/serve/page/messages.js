// How a message is shown: its text, what can be done with it, and how its answer went.

import { copyButton, el, icon, iconButton, sends } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { alternatives } from "./chats.js";

const REASONS = {
  stop: "complete",
  length: "cut at the limit of tokens",
  stopped: "stopped by you",
  interrupted: "interrupted: the page was closed or reloaded",
};

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** Returns the tokens per second of an answer, without the time until the first one, which is the prompt's. */
function speed({ usage, first, seconds }) {
  // An answer that arrived at once shows no speed but that of its request.
  const rate = seconds - first < 0.05 ? usage.completion_tokens / seconds : (usage.completion_tokens - 1) / (seconds - first);
  return rate >= 100 ? Math.round(rate).toLocaleString("en") : rate.toPrecision(3);
}

/** Returns how an answer went: model, tokens, speed, why it ended. */
export function summary(message) {
  const { model, usage, first, reason } = message;
  const parts = [model];
  if (usage) {
    parts.push(plural(usage.completion_tokens, "token"));
    if (first !== undefined) parts.push(`${speed(message)} tokens/s`);
  }
  if (first !== undefined) parts.push(`first after ${first < 10 ? first.toFixed(2) : first.toFixed(0)} s`);
  if (reason) parts.push(REASONS[reason] ?? reason);
  return parts.filter(Boolean).join(" · ");
}

/** Returns the thoughts that a reasoning model writes before its answer, and the answer. */
function splitThoughts(text) {
  const match = /^\s*<think>([^]*?)(?:<\/think>|$)/.exec(text);
  return match ? [match[1].trim(), text.slice(match[0].length)] : ["", text];
}

/** A message in the document. `actions`: what its buttons call, see app.js. */
export class MessageView {
  constructor(chat, message, actions) {
    Object.assign(this, { chat, message, actions });
    this.body = el("div", { class: "body" });
    this.foot = el("footer", { class: "foot" });
    const title = message.role === "user" ? "You" : `Answer of ${message.model ?? "the model"}`;
    const heading = el("h2", { class: "visually-hidden" }, title);
    this.element = el("article", { class: `message ${message.role}` }, heading, this.body, this.foot);
    if (message.role === "assistant") {
      this.thoughts = new MarkdownView();
      this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thoughts"), this.thoughts.element);
      this.text = new MarkdownView();
      this.body.append(this.thinking, this.text.element);
    }
  }

  /** Shows the state of the message. `running`: its answer arrives; `busy`: an answer of the chat does. */
  update({ running = false, busy = false } = {}) {
    const { message } = this;
    if (message.role === "user") {
      this.body.replaceChildren(el("div", { class: "bubble", dir: "auto" }, message.content));
    } else {
      const [thoughts, answer] = splitThoughts(message.content);
      this.thoughts.update(thoughts, running && !answer);
      this.thinking.hidden = !thoughts;
      this.text.update(answer, running);
    }
    this.element.classList.toggle("running", running);
    this.element.classList.toggle("waiting", running && !message.content);
    this.element.setAttribute("aria-busy", String(running));
    if (!running || !this.foot.hasChildNodes()) this.showFoot(running, busy);
  }

  showFoot(running, busy) {
    const { message, actions } = this;
    const parts = [];
    if (message.error && !running) parts.push(this.error(busy));
    const tools = el("div", { class: "tools" });
    if (message.role === "user") {
      tools.append(
        this.switcher(busy),
        copyButton("Copy this message", () => message.content),
        iconButton("edit", "Edit and send again", () => this.edit(), { disabled: busy }),
      );
    } else if (!running) {
      if (message.content) tools.append(copyButton("Copy this answer", () => message.content));
      if (!message.error) {
        tools.append(iconButton("again", "Answer again", () => actions.regenerate(message), { disabled: busy }));
      }
      tools.append(
        this.switcher(busy),
        el("span", { class: "summary" }, summary(message)),
      );
    }
    if (tools.hasChildNodes()) parts.push(tools);
    this.foot.replaceChildren(...parts);
  }

  error(busy) {
    const { error } = this.message;
    const wait = error.retryAfter ? ` Wait ${plural(error.retryAfter, "second")}.` : "";
    const retry = el("button", { type: "button", class: "button", disabled: busy }, "Try again");
    retry.addEventListener("click", () => this.actions.regenerate(this.message));
    return el("div", { class: "problem" }, icon("alert"), el("p", {}, error.message + wait), retry);
  }

  /** Returns buttons that show the alternatives of this message, or nothing where it has none. */
  switcher(busy) {
    const all = alternatives(this.chat, this.message);
    if (all.length < 2) return "";
    const at = all.indexOf(this.message);
    const step = (name, label, to) =>
      iconButton(name, label, () => this.actions.showBranch(all[to]), { disabled: busy || !all[to] });
    const what = this.message.role === "user" ? "message" : "answer";
    return el(
      "span",
      { class: "switcher", role: "group", "aria-label": `Versions of this ${what}` },
      step("previous", `Previous ${what}`, at - 1),
      el("span", {}, `${at + 1}/${all.length}`),
      step("next", `Next ${what}`, at + 1),
    );
  }

  /** Replaces the message by a field; what is sent from there is a new message beside the old one. */
  edit() {
    const { message, actions } = this;
    const field = el("textarea", { class: "field", rows: 3, "aria-label": "Edit the message", dir: "auto" });
    field.value = message.content;
    const close = () => {
      this.element.classList.remove("editing");
      this.update();
      this.element.querySelector('[aria-label^="Edit"]')?.focus();
    };
    const send = () => {
      if (field.value.trim()) actions.resend(message, field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (sends(event)) {
        event.preventDefault();
        send();
      }
    });
    const button = (text, listener, kind) => {
      const made = el("button", { type: "button", class: `button ${kind}` }, text);
      made.addEventListener("click", listener);
      return made;
    };
    this.body.replaceChildren(field);
    this.foot.replaceChildren(
      el("div", { class: "tools editing-tools" }, button("Cancel", close, ""), button("Send", send, "primary")),
    );
    this.element.classList.add("editing");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}
