// The page's dialogs: settings, API key, shortcuts and questions.

import { byId, el } from "./dom.js";
import { apiKey } from "./client.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** Asks a question; resolves to whether the user agreed. */
export function confirmDialog(question, action) {
  const dialog = byId("confirm");
  byId("confirm-question").textContent = question;
  byId("confirm-yes").textContent = action;
  return open(dialog, byId("confirm-no")).then((result) => result === "yes");
}

/** Asks for the API key; resolves to whether one was given. */
export async function askForKey(reason) {
  const field = byId("key-field");
  byId("key-reason").textContent = reason;
  field.value = "";
  const given = (await open(byId("key"), field)) === "yes" && field.value.trim() !== "";
  if (given) apiKey.set(field.value.trim());
  field.value = "";
  return given;
}

export const showShortcuts = () => open(byId("shortcuts"));

/** Shows the settings of a chat. `changed(settings)` is called after each valid change. */
export function showSettings(settings, changed) {
  const form = byId("settings-form");
  byId("system").value = settings.system ?? "";
  for (const name of NUMBERS) byId(name).value = settings[name] ?? "";
  byId("forget-key").hidden = !apiKey.get();
  form.oninput = () => {
    const now = { ...settings, system: byId("system").value };
    for (const name of NUMBERS) {
      const field = byId(name);
      const text = field.value.trim();
      const problem = problemOf(field, text);
      field.setCustomValidity(problem);
      byId(`${name}-problem`).textContent = problem;
      if (!problem) now[name] = text === "" ? null : Number(text);
    }
    settings = now;
    changed(now);
  };
  form.oninput();
  return open(byId("settings"));
}

/** Returns what is wrong with the number in a field, or "". */
function problemOf(field, text) {
  if (text === "") return "";
  const [number, low, high] = [Number(text), Number(field.dataset.low), Number(field.dataset.high)];
  const whole = field.inputMode === "numeric";
  if (number >= low && number <= high && (!whole || Number.isSafeInteger(number))) return "";
  const kind = whole ? "a whole number" : "a number";
  return Number.isFinite(high) ? `Give ${kind} from ${low} to ${high}` : `Give ${kind} of at least ${low}`;
}

/** Opens a dialog; resolves to the value of the button that closed it. */
function open(dialog, focused) {
  dialog.returnValue = "";
  dialog.showModal();
  focused?.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}

/** Makes the buttons of all dialogs close them. */
export function prepareDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const button of dialog.querySelectorAll("button[value]")) {
      button.addEventListener("click", () => dialog.close(button.value));
    }
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // beside the dialog
    });
    for (const form of dialog.querySelectorAll("form")) {
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        dialog.close("yes");
      });
    }
  }
  byId("forget-key").addEventListener("click", (event) => {
    apiKey.set("");
    event.target.hidden = true;
  });
  const keys = [
    ["Enter", "send the message"],
    ["Shift Enter", "new line"],
    ["Escape", "stop the answer, or close what is open"],
    ["↑ in the empty field", "edit your last message"],
    ["Ctrl Shift O", "new chat"],
    ["Ctrl Shift L", "answer again"],
    ["Ctrl /", "these shortcuts"],
  ];
  const mac = /Mac|iPhone|iPad/.test(navigator.userAgent);
  for (const [combination, what] of keys) {
    const named = mac ? combination.replace("Ctrl", "⌘") : combination;
    byId("shortcut-list").append(el("dt", {}, el("kbd", {}, named)), el("dd", {}, what));
  }
}
