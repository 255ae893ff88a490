// Requests for answers, and the parts of an answer as they arrive.

import { requestMessages } from "./chats.js";
import { streamChat } from "./client.js";

const SAVE_EVERY = 1000; // milliseconds

/** Returns the body of the request for an answer to `question`. */
export function requestBody(asked, question, model) {
  // Before the list of models has arrived, the server chooses: its first model.
  const body = { ...(model && { model }), messages: requestMessages(asked, question) };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (typeof asked.settings[name] === "number") body[name] = asked.settings[name];
  }
  return body;
}

/** Adds the parts of an answer to `message` while they arrive. `draw` and `save` are called now and then. */
export async function receive(message, body, { signal, draw, save }) {
  const begin = performance.now();
  let [firstAt, lastAt, saved] = [null, begin, begin];
  const drawSoon = drawer(draw);
  for await (const { text, reason, usage } of streamChat(body, signal)) {
    if (text) {
      message.content += text;
      lastAt = performance.now();
      firstAt ??= lastAt;
      message.first = (firstAt - begin) / 1000;
      message.seconds = (lastAt - begin) / 1000;
      drawSoon();
      if (lastAt - saved > SAVE_EVERY) {
        save();
        saved = lastAt;
      }
    }
    if (reason) message.reason = reason;
    if (usage) message.usage = { prompt_tokens: usage.prompt_tokens, completion_tokens: usage.completion_tokens };
  }
  if (message.reason === "interrupted") message.reason = null; // the server gave none
}

/** Returns a function that draws soon, at most once a frame, and less often where drawing takes long. */
function drawer(draw) {
  let planned = false;
  let rest = 0;
  return () => {
    if (planned) return;
    planned = true;
    setTimeout(() => {
      requestAnimationFrame(() => {
        planned = false;
        const begin = performance.now();
        draw();
        rest = Math.min(1000, 3 * (performance.now() - begin));
      });
    }, rest);
  };
}
