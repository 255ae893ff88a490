// The notice above the chat.

import { byId } from "./dom.js";

/** Shows `text` in the place of the last notice. `subject`: what it is about; "server" has a button to try again. */
export function notify(text, subject = "storage") {
  byId("notice-text").textContent = text;
  byId("notice").dataset.subject = subject;
  byId("notice").hidden = false;
  byId("retry").hidden = subject !== "server";
}

/** Removes the notice if it is about `subject`. */
export function clear(subject) {
  if (byId("notice").dataset.subject === subject) byId("notice").hidden = true;
}
