// Requests to the server's OpenAI-compatible endpoints. Addresses are relative, so that the page also works behind a
// proxy that serves it under a path.

const KEY = "weft.api-key";

/** A refusal of the server, or a connection that failed. `message` is for people. */
export class ServerError extends Error {
  constructor(message, status = 0, code = "", retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** The API key, kept until the tab is closed. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

async function request(path, options = {}) {
  const headers = { ...(options.body && { "Content-Type": "application/json" }) };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. It may be stopped or restarting.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    // Not the server's own answer, but a proxy's, say: the status is all there is.
  }
  const wait = response.headers.get("Retry-After");
  const retryAfter = /^\d+$/.test(wait ?? "") ? Number(wait) : null;
  const words = sentence(error?.message ?? `the server answered with status ${response.status} ${response.statusText}`);
  return new ServerError(words, response.status, String(error?.code ?? ""), retryAfter);
}

function sentence(text) {
  const words = String(text).trim();
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?…]$/.test(words) ? "" : ".");
}

/** Returns what the server serves: models and adapters, `[{ id, parent, max_model_len }]`. */
export async function listModels() {
  const { data } = await (await request("v1/models")).json();
  return data;
}

/** Yields the parts of a streamed answer: `{ text, reason, usage }`, each null where a part has none. */
export async function* streamChat(body, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(streamed), signal });
  let complete = false;
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(sentence(chunk.error.message), 0, String(chunk.error.code ?? ""));
    const choice = chunk.choices?.[0];
    complete ||= Boolean(choice?.finish_reason);
    yield { text: choice?.delta?.content ?? null, reason: choice?.finish_reason ?? null, usage: chunk.usage ?? null };
  }
  if (!complete) throw new ServerError("The connection ended before the answer was complete.");
}

/** Yields the data of each event of a `text/event-stream`. */
async function* serverSentEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let [rest, data] = ["", []];
  try {
    for (;;) {
      let read;
      try {
        read = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection to the server broke.");
      }
      rest += decoder.decode(read.value, { stream: !read.done });
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) yield data.splice(0).join("\n");
      }
      if (read.done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that failed has nothing to cancel
  }
}
