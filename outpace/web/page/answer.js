// The text of an answer, coloured by the proposer whose accepted draft it was in, and the card that explains a draft.

import { $, element, plural, speak } from "./dom.js";

const shown = new WeakMap(); // stretch element -> origin

export class AnswerText {
  /** `root`: the element that gets the text. */
  constructor(root) {
    this.root = root;
    this.text = "";
    this.stretches = []; // [text, index in `drafts` or -1, is_accepted], to keep over a reload
    this.drafts = [];
    this._queue = [];
    this._frame = 0;
    root.addEventListener("keydown", (event) => onKey(root, event));
  }

  add(text, origin) {
    this.text += text;
    this._remember(text, origin);
    this._queue.push([text, origin]);
    this._frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Write what is queued. Once per frame: there may be hundreds of tokens a second. */
  flush() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    const queue = this._queue;
    this._queue = [];
    for (const [text, origin] of queue) this._write(text, origin);
  }

  _write(text, origin) {
    const last = this.root.lastChild;
    if (!origin) {
      if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
      else this.root.append(text);
      return;
    }
    const before = last && shown.get(last);
    if (before && before.at === origin.at && before.is_accepted === origin.is_accepted) {
      last.firstChild.appendData(text);
      return;
    }
    const stretch = element("span", { class: origin.is_accepted ? "drafted" : "own" }, text);
    if (origin.is_accepted) stretch.dataset.proposer = origin.proposer;
    shown.set(stretch, origin);
    this.root.append(stretch);
  }

  _remember(text, origin) {
    if (!origin) {
      this.stretches.push([text, -1, 0]);
      return;
    }
    if (this.drafts.at(-1)?.at !== origin.at) this.drafts.push({ ...origin, is_accepted: undefined });
    this.stretches.push([text, this.drafts.length - 1, origin.is_accepted ? 1 : 0]);
  }

  /** Draft tokens and accepted ones, by proposer. */
  counts() {
    const found = new Map();
    for (const draft of this.drafts) {
      const counts = found.get(draft.proposer) ?? { drafted: 0, accepted: 0 };
      counts.drafted += draft.draft.length;
      counts.accepted += draft.accepted;
      found.set(draft.proposer, counts);
    }
    return found;
  }

  save() {
    return { text: this.text, stretches: this.stretches, drafts: this.drafts };
  }

  restore({ text, stretches, drafts }) {
    if (!stretches) this.add(text, null);
    for (const [part, place, isAccepted] of stretches ?? []) {
      this.add(part, place < 0 ? null : { ...drafts[place], is_accepted: isAccepted === 1 });
    }
    this.flush();
  }
}

export function legend(counts) {
  const list = element("ul", { class: "legend", "aria-label": "Accepted draft tokens by proposer" });
  for (const [proposer, { drafted, accepted }] of counts) {
    const swatch = element("span", { class: "swatch" });
    swatch.dataset.proposer = proposer;
    list.append(element("li", {}, swatch, `${proposer} ${accepted} of ${drafted}`));
  }
  return list;
}

// ---- the card

const SIGNS = { "\n": "↵", "\t": "⇥", "": "∅" };
const visible = (token) => (token.trim() ? token.replaceAll("\n", "↵") : SIGNS[token] ?? token.replaceAll("\n", "↵").replaceAll(" ", "␣"));

function describe(origin) {
  const { proposer, draft, accepted, lenient } = origin;
  const left = draft.length - accepted;
  const rest = left === 0 ? "all accepted, and the model added one token" : accepted === 0
    ? "none accepted: the model wrote its own token" : `${accepted} accepted, then the model wrote its own token`;
  const lossy = lenient ? ` ${plural(lenient, "token")} passed only by the lossy rule.` : "";
  return `${proposer} drafted ${plural(draft.length, "token")}: ${rest}.${lossy}`;
}

function showCard(stretch, { aloud = false } = {}) {
  const origin = shown.get(stretch);
  const card = $("card");
  hideCard();
  if (!origin) return;
  stretch.classList.add("current");
  const swatch = element("span", { class: "swatch" });
  swatch.dataset.proposer = origin.proposer;
  const tokens = element("p", { class: "tokens" });
  origin.draft.forEach((token, place) => {
    tokens.append(element("span", { class: place < origin.accepted ? "accepted" : "rejected" }, visible(token)));
  });
  const depth = `depth ${origin.draft.length}, ${origin.accepted} accepted`;
  card.replaceChildren(
    element("p", { class: "card-title" }, swatch, `${origin.proposer} · ${depth}`), tokens,
    element("p", { class: "note" }, origin.is_accepted ? describe(origin) : `${describe(origin)} This is that token.`),
  );
  card.hidden = false;
  place(card, stretch.getClientRects()[0] ?? stretch.getBoundingClientRect());
  if (aloud) speak(describe(origin), { now: true });
}

function place(card, around) {
  card.style.left = "0"; // near the right edge it would be narrower
  const width = card.offsetWidth;
  const height = card.offsetHeight;
  const left = Math.min(Math.max(8, around.left), window.innerWidth - width - 8);
  const above = around.top - height - 8;
  card.style.left = `${left + window.scrollX}px`;
  card.style.top = `${(above > 8 ? above : around.bottom + 8) + window.scrollY}px`;
}

export function hideCard() {
  $("card").hidden = true;
  for (const each of document.querySelectorAll(".current")) each.classList.remove("current");
}

function onKey(root, event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  const all = [...root.querySelectorAll(".drafted")];
  if (!all.length) return;
  event.preventDefault();
  const at = all.indexOf(root.querySelector(".current"));
  const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + step, 0), all.length - 1)];
  next.scrollIntoView({ block: "nearest" });
  showCard(next, { aloud: true });
}

export function prepareCards() {
  const stretchOf = (event) => event.target.closest?.(".drafted, .own");
  document.addEventListener("mouseover", (event) => {
    const stretch = stretchOf(event);
    if (stretch) showCard(stretch);
    else if (!event.target.closest?.("#card")) hideCard();
  });
  document.addEventListener("click", (event) => {
    const stretch = stretchOf(event);
    if (stretch) showCard(stretch);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideCard(); });
  document.addEventListener("focusout", hideCard);
  for (const change of ["hashchange", "resize"]) addEventListener(change, hideCard);
}
