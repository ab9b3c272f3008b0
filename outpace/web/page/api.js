// Requests to the server that this page came from. Addresses are relative, so that a proxy may offer it under any path.

const KEY = "outpace-key";
let askForKey = async () => null;
let asking = null; // one question for all requests that were refused

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** `ask(reason)` gives a key, or null if there is none. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** The response to a request. Where the server wants a key, the user is asked for one, and the request is sent again. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401 || !(await newKey(key))) throw error;
  }
}

async function newKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true; // another request has asked in the meantime
  asking ??= askForKey(refused ? "The server refused this key." : "").finally(() => { asking = null; });
  const key = await asking;
  if (key === null) return false;
  sessionStorage.setItem(KEY, key);
  return true;
}

async function errorOf(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    const reply = await response.json();
    message = reply.error?.message ?? message;
  } catch { /* not JSON: the status says it */ }
  return new ApiError(message, response.status);
}

/** The server-sent events of a response, as {name, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const event = { name: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * A streamed chat. `onText(text, origin, isThinking)` gets text of one origin at a time; the result has the figures.
 * A stream that breaks off throws.
 */
export async function chat(body, { signal, onText, onStart = () => {} }) {
  const began = performance.now();
  const found = { tokens: [], prompt: [], usage: null, finish: null, first: null, seconds: 0 };
  const streamed = { ...body, stream: true, stream_options: { include_usage: true, include_drafts: true } };
  const response = await call("v1/chat/completions", { body: streamed, signal });
  onStart();
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      found.seconds = (performance.now() - began) / 1000;
      return found;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
    if (chunk.prompt_token_ids) found.prompt = chunk.prompt_token_ids;
    if (chunk.usage) found.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    if (choice.token_ids) for (const token of choice.token_ids) found.tokens.push(token);
    if (choice.finish_reason) found.finish = choice.finish_reason;
    const { content, reasoning } = choice.delta;
    if ((content || reasoning) && found.first === null) found.first = (performance.now() - began) / 1000;
    if (reasoning) onText(reasoning, choice.speculation, true);
    if (content) onText(content, choice.speculation, false);
  }
  throw new ApiError("the connection was lost before the end of the answer", 0);
}
