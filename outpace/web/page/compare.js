// Plain decoding beside auto: the same prompt and seed, two clocks, and whether the texts are equal.

import { call, chat } from "./api.js";
import { AnswerText, legend } from "./answer.js";
import { $, duration, element, plural, speak, times } from "./dom.js";
import { fields, systemMessages } from "./settings.js";

let running = null;

export function prepareCompare() {
  $("comparison").addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  $("compare-stop").addEventListener("click", () => running?.abort());
}

export function compareWith(prompt) {
  $("compare-prompt").value = prompt;
  location.hash = "#compare";
  $("run").focus();
}

async function compare() {
  const prompt = $("compare-prompt").value.trim();
  if (running || !prompt) return;
  const controller = running = new AbortController();
  $("run").hidden = true;
  $("compare-stop").hidden = false;
  tell("running", "Plain decoding runs first.");
  const sides = ["plain", "auto"].map((name) => new Side($(`side-${name}`)));
  try {
    const found = [];
    for (const [place, mode] of ["off", "auto"].entries()) {
      if (place) tell("running", "Now auto.");
      found.push(await sides[place].run(request(prompt, mode), controller.signal));
    }
    await judge(found, sides, controller.signal);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    tell("bad", isStopped ? "Stopped before both were complete." : `It failed: ${error.message}.`);
  } finally {
    running = null;
    $("run").hidden = false;
    $("compare-stop").hidden = true;
  }
}

function request(prompt, mode) {
  return {
    ...fields({ mode }),
    messages: [...systemMessages(), { role: "user", content: prompt }],
    seed: Number($("compare-seed").value || 1),
    max_completion_tokens: Number($("compare-tokens").value || 256),
    return_token_ids: true,
    // With a salt of its own, a run finds neither the other's cache nor its text, which would be a perfect draft.
    cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-"),
  };
}

class Side {
  constructor(root) {
    this.root = root;
    this.clock = root.querySelector(".clock");
    this.facts = root.querySelector(".facts");
    const old = root.querySelector(".text");
    const fresh = old.cloneNode(false); // without the listeners of the last run
    old.replaceWith(fresh);
    this.text = new AnswerText(fresh);
    this.clock.textContent = "0.00 s";
    this.facts.replaceChildren();
    root.dataset.state = "waiting";
  }

  async run(body, signal) {
    const began = performance.now();
    this.root.dataset.state = "running";
    const tick = setInterval(() => this._show((performance.now() - began) / 1000), 50);
    try {
      const found = await chat(body, { signal, onText: (text, origin) => this.text.add(text, origin) });
      this.text.flush();
      this._show(found.seconds);
      const count = found.usage.completion_tokens;
      const rate = ((count - 1) / Math.max(found.seconds - (found.first ?? 0), 1e-6)).toFixed(0);
      this.facts.replaceChildren(`${plural(count, "token")} · ${rate} a second · first after ${duration(found.first ?? 0)}`,
        legend(this.text.counts()));
      this.root.dataset.state = "done";
      return found;
    } finally {
      clearInterval(tick);
      if (this.root.dataset.state !== "done") this.root.dataset.state = "stopped";
    }
  }

  _show(seconds) {
    this.clock.textContent = `${seconds.toFixed(2)} s`;
  }
}

async function judge([plain, auto], sides, signal) {
  const ratio = plain.seconds / auto.seconds;
  const speed = ratio >= 1 ? `auto was ${times(ratio)} as fast` : `auto took ${times(1 / ratio)} as long`;
  const at = firstDifference(plain.tokens, auto.tokens);
  if (at < 0) {
    tell("good", `Identical text: ${plural(plain.tokens.length, "token")}, and ${speed}.`);
    return;
  }
  markDifference(sides);
  tell("running", `They differ from token ${at + 1} on. Asking the model how close the choice was.`);
  const gap = await topTwoGap([...plain.prompt, ...plain.tokens.slice(0, at)], signal);
  const size = gap === null ? "The gap of the two likeliest tokens there is not known."
    : `The two likeliest tokens there are ${gap.toPrecision(2)} apart in log-probability${gap < 0.05 ? ", which is rounding" : ""}.`;
  tell(gap !== null && gap < 0.05 ? "warn" : "bad", `First difference at token ${at + 1} of ${plain.tokens.length}. ${size} ${speed[0].toUpperCase()}${speed.slice(1)}.`);
}

function firstDifference(one, other) {
  const length = Math.min(one.length, other.length);
  for (let at = 0; at < length; at++) if (one[at] !== other[at]) return at;
  return one.length === other.length ? -1 : length;
}

/** How far apart the two likeliest tokens are after these, in log-probability; null if the server does not say. */
async function topTwoGap(tokens, signal) {
  const body = { prompt: tokens, max_tokens: 1, temperature: 0, logprobs: 2, speculation: { mode: "off" } };
  const reply = await (await call("v1/completions", { body, signal })).json();
  const [first, second] = Object.values(reply.choices[0].logprobs?.top_logprobs?.[0] ?? {}).sort((a, b) => b - a);
  return second === undefined ? null : first - second;
}

function markDifference(sides) {
  const [one, other] = sides.map((side) => side.text.text);
  let at = 0;
  while (at < one.length && one[at] === other[at]) at++;
  for (const { text } of sides) markAt(text.root, at);
}

function markAt(root, at) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (at < node.length) {
      node.splitText(at).before(element("mark", { class: "differs", title: "first difference" }, "≠"));
      return;
    }
    at -= node.length;
  }
}

function tell(state, text) {
  const outcome = $("outcome");
  outcome.hidden = false;
  outcome.dataset.state = state;
  outcome.textContent = text;
  if (state !== "running") speak("", { now: true });
}
