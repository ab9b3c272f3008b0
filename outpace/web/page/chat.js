// The conversation. It lives in this tab: a reload keeps it, closing the tab forgets it.

import { chat } from "./api.js";
import { AnswerText, legend } from "./answer.js";
import { $, duration, element, plural, speak, times } from "./dom.js";
import { fields, systemMessages } from "./settings.js";

const STORE = "outpace-conversation";
const EXAMPLES = [
  "Write a Python function that adds two numbers, then write it again with type hints.",
  "List the planets of the solar system with one fact each.",
  "Explain speculative decoding to a child.",
];
const turns = []; // {role, content} of the user, or {role, answer, thinking, item, state} of the assistant
let running = null; // AbortController of the answer that streams
let isLeaving = false; // a reload breaks streams off, which is no fault of the server

export function prepareChat({ onCompare }) {
  for (const text of EXAMPLES) {
    $("examples").append(element("button", { type: "button", class: "example", onclick: () => send(text) }, text));
  }
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send($("prompt").value);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send($("prompt").value);
    }
  });
  $("prompt").addEventListener("input", fitPrompt);
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", clear);
  addEventListener("beforeunload", () => { isLeaving = true; });
  addEventListener("pagehide", () => {
    isLeaving = true;
    save();
  });
  addEventListener("pageshow", () => { isLeaving = false; });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("view-chat").hidden && $("card").hidden) running.abort();
  });
  compareWith = onCompare;
  restore();
}

let compareWith = () => {};

function fitPrompt() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, 240)}px`;
}

function clear() {
  running?.abort();
  turns.length = 0;
  $("turns").replaceChildren();
  sessionStorage.removeItem(STORE);
  update();
  $("prompt").focus();
}

function update() {
  $("welcome").hidden = turns.length > 0;
  $("new").hidden = turns.length === 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
}

async function send(text) {
  if (running || !text.trim()) return;
  addUser(text);
  $("prompt").value = "";
  fitPrompt();
  await answer();
}

function addUser(content) {
  const compare = element("button", { type: "button", class: "link", onclick: () => compareWith(content) }, "Compare");
  const item = element("li", { class: "turn user" }, element("div", { class: "said" }, content), compare);
  turns.push({ role: "user", content });
  $("turns").append(item);
}

function addAssistant() {
  const text = element("div", {
    class: "text", tabIndex: 0, role: "group", "aria-label": "Answer; arrow keys go from draft to draft",
  });
  const inner = element("div", { class: "text" });
  const thinking = element("details", { class: "thinking", hidden: true }, element("summary", {}, "Thinking"), inner);
  const facts = element("div", { class: "facts" });
  const item = element("li", { class: "turn assistant" }, thinking, text, facts);
  const turn = { role: "assistant", answer: new AnswerText(text), thinking: new AnswerText(inner), item, facts, state: "" };
  turns.push(turn);
  $("turns").append(item);
  return turn;
}

const messages = () => [
  ...systemMessages(),
  ...turns.map((turn) => ({ role: turn.role, content: turn.content ?? turn.answer.text })),
];

async function answer() {
  const body = { messages: messages(), ...fields() };
  const turn = addAssistant();
  const controller = running = new AbortController();
  turn.item.dataset.state = turn.state = "streaming";
  turn.item.setAttribute("aria-busy", "true");
  update();
  follow(true);
  try {
    const found = await chat(body, {
      signal: controller.signal,
      onText(text, origin, isThinking) {
        const part = isThinking ? turn.thinking : turn.answer;
        if (isThinking) turn.item.querySelector(".thinking").hidden = false;
        part.add(text, origin);
        if (!isThinking) speak(text);
        follow();
      },
    });
    finish(turn, "done", figures(found));
  } catch (error) {
    if (isLeaving) return;
    const isStopped = error.name === "AbortError";
    finish(turn, isStopped ? "stopped" : "failed", isStopped ? ["stopped"] : [sentence(error)]);
  } finally {
    if (running === controller) running = null;
    if (!isLeaving) {
      update();
      save();
    }
  }
}

function sentence(error) {
  return error.status === undefined ? "the server cannot be reached; it is tried again in the background" : error.message;
}

function figures({ usage, seconds, first, finish }) {
  const count = usage.completion_tokens;
  const found = [plural(count, "token"), duration(seconds)];
  if (first !== null && count > 1) {
    found.push(`${((count - 1) / Math.max(seconds - first, 1e-6)).toFixed(0)} a second`, `first after ${duration(first)}`);
  }
  const { drafted, estimated_speedup: speedup, lossy } = usage.speculation;
  if (speedup !== null) found.push(`about ${times(speedup)} plain`);
  else if (!drafted) found.push("no drafts");
  if (lossy) found.push("LOSSY");
  if (finish === "length") found.push("cut at the most tokens");
  return found;
}

function finish(turn, state, facts) {
  turn.answer.flush();
  turn.thinking.flush();
  turn.item.dataset.state = turn.state = state;
  turn.item.removeAttribute("aria-busy");
  turn.figures = facts;
  const again = element("button", { type: "button", class: "link", onclick: () => retry(turn) }, "Again");
  const copy = element("button", {
    type: "button", class: "link", hidden: !navigator.clipboard, // browsers have it at localhost and by TLS only
    onclick: () => navigator.clipboard.writeText(turn.answer.text),
  }, "Copy");
  turn.facts.replaceChildren(element("p", { class: "note" }, facts.join(" · ")), legend(turn.answer.counts()),
    element("p", { class: "actions" }, copy, again));
  speak(`. ${state === "done" ? "Answer complete" : facts.join(", ")}.`, { now: true });
  follow();
}

function retry(turn) {
  if (running) return;
  const at = turns.indexOf(turn);
  for (const later of turns.splice(at)) later.item?.remove();
  while ($("turns").childElementCount > turns.length) $("turns").lastElementChild.remove();
  answer();
}

/** Stay at the end while text comes, unless the reader has scrolled away from it. */
let following = 0;
function follow(always = false) {
  const distance = document.documentElement.scrollHeight - innerHeight - scrollY;
  if (!always && distance > 160) return;
  following ||= requestAnimationFrame(() => {
    following = 0;
    scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
  });
}

function save() {
  if (!turns.length) return;
  const kept = (withDrafts) => JSON.stringify(turns.map((turn) => turn.role === "user"
    ? { role: "user", content: turn.content }
    : {
      role: "assistant", state: turn.state, figures: turn.figures,
      answer: withDrafts ? turn.answer.save() : { text: turn.answer.text },
      thinking: withDrafts ? turn.thinking.save() : { text: turn.thinking.text },
    }));
  for (const withDrafts of [true, false]) {
    try {
      sessionStorage.setItem(STORE, kept(withDrafts));
      return;
    } catch { /* larger than a browser keeps: try again without drafts */ }
  }
}

function restore() {
  let kept = [];
  try {
    kept = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
  } catch { /* not ours */ }
  for (const each of kept) {
    if (each.role === "user") {
      addUser(each.content);
      continue;
    }
    const turn = addAssistant();
    turn.answer.restore(each.answer);
    turn.thinking.restore(each.thinking);
    turn.item.querySelector(".thinking").hidden = !turn.thinking.text;
    const wasCut = each.state === "streaming";
    finish(turn, wasCut ? "stopped" : each.state, wasCut ? ["cut off by a reload"] : each.figures);
  }
  update();
}
