// The live view: does speculation pay right now, for whom does it not, and why was it decided so.

import { shareBars, shareLines, sparkline } from "./charts.js";
import { $, duration, element, plural, times } from "./dom.js";
import { History, drafted, rate, speedup } from "./history.js";

const RECENT = 8; // seconds
const LONGER = 30;
const FEW = 3; // draft tokens at a position: with fewer, a share says nothing
const PAYS = 1.02;
const LOSES = 0.98;
const history = new History();
let about = null;

export function setAbout(facts) {
  about = facts;
}

/** Take a snapshot; returns the figures for the head of the page. */
export function addSnapshot(snapshot) {
  history.add(snapshot);
  const earlier = history.before(RECENT);
  const found = { rate: tokensPerSecond(), speed: speedup(earlier, snapshot), running: snapshot.running };
  if (!$("view-live").hidden) show(earlier, found);
  return found;
}

export function showLive() {
  if (history.latest) show(history.before(RECENT), { rate: tokensPerSecond(), speed: speedup(history.before(RECENT), history.latest) });
}

function tokensPerSecond() {
  const later = history.latest;
  const earlier = history.before(2);
  return earlier === later ? 0 : rate("generated")(earlier, later);
}

function show(earlier, { rate: tokens, speed }) {
  const now = history.latest;
  showVerdict(earlier, now, speed);
  $("live-rate").textContent = tokens < 10 ? tokens.toFixed(1) : tokens.toFixed(0);
  $("note-rate").textContent = `${plural(now.generated, "token")} since the start`;
  $("live-speed").textContent = speed === null ? "–" : times(speed);
  const drafts = drafted(earlier, now);
  $("note-speed").textContent = drafts.drafted
    ? `${drafts.accepted} of ${plural(drafts.drafted, "draft token")} accepted in ${RECENT} s` : `no drafts in ${RECENT} s`;
  $("live-running").textContent = now.running;
  $("live-waiting").textContent = now.waiting;
  $("note-requests").textContent = `${plural(now.finished, "request")} ended${now.faults ? `, ${plural(now.faults, "fault")}` : ""}`;
  showCache(now);
  showStep(earlier, now);
  showLedger(now);
  const label = "over the last seconds";
  sparkline($("spark-rate"), history.series(rate("generated")), { label: `Tokens a second ${label}` });
  sparkline($("spark-speed"), history.series(speedup), { label: `Speed over plain ${label}; the dashed line is plain`, reference: 1 });
  sparkline($("spark-running"), history.series((_, later) => later.running), { label: `Running requests ${label}` });
  showPositions(now);
  showDepths(now);
  showRequests(now.requests);
  showTrace(now.trace);
}

function showVerdict(earlier, now, speed) {
  const { losing, known } = now.requests;
  const drafts = drafted(earlier, now);
  let [state, title] = ["idle", "Nothing runs."];
  if (now.running && !drafts.drafted) [state, title] = ["plain", "Plain decoding: no draft would pay right now."];
  if (now.running && !drafts.drafted && now.requests.shown.every((each) => each.mode === "off")) [state, title] = ["plain", "Plain decoding: speculation is off for what runs."];
  if (drafts.drafted && speed !== null) {
    if (speed >= PAYS) [state, title] = ["pays", `Speculation pays: ${times(speed)} plain decoding.`];
    else if (speed > LOSES) [state, title] = ["even", `Speculation neither gains nor loses: ${times(speed)} plain decoding.`];
    else [state, title] = ["loses", `Speculation costs: ${times(speed)} plain decoding.`];
  } else if (now.running && drafts.drafted) {
    [state, title] = ["even", "Drafts are verified; their speed is not known yet."];
  }
  $("now").dataset.state = state;
  $("now-title").textContent = title;
  $("now-note").textContent = !now.running ? (speed === null ? "Send a request, or ask something in the chat." : `Measured over the last ${RECENT} seconds of decoding.`)
    : known === 0 ? `For ${plural(now.running, "running request")} it is too early to say.`
      : losing ? `It has not paid so far for ${losing} of ${plural(known, "running request")}: see below.`
        : known === 1 ? "The running request does not lose by it." : `None of ${known} running requests loses by it.`;
}

function showCache(now) {
  const percent = 100 * now.cache;
  $("live-cache").textContent = `${percent < 10 ? percent.toFixed(1) : percent.toFixed(0)}%`;
  $("meter-cache").setAttribute("aria-valuenow", percent.toFixed(0));
  $("meter-cache").firstElementChild.style.width = `${percent}%`;
  const held = about ? `${Math.round(now.cache * about.cache_tokens).toLocaleString("en")} of ${plural(about.cache_tokens, "token")}` : "";
  $("note-cache").textContent = `${held}${now.preemptions ? `; ${plural(now.preemptions, "preemption")}` : ""}`;
}

function showStep(earlier, now) {
  const steps = now.steps - earlier.steps;
  const parts = Object.entries(now.seconds).map(([name, total]) => [name, steps ? (total - earlier.seconds[name]) / steps : 0]);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  $("live-step").textContent = steps ? duration(total) : "–";
  $("stack-step").replaceChildren(...parts.map(([name, seconds]) => {
    const bar = element("span", { title: `${name}: ${duration(seconds)}` });
    bar.dataset.part = name;
    bar.style.flexGrow = `${(100 * seconds) / (total || 1)}`;
    return bar;
  }));
  const compared = [];
  if (now.plain_step) compared.push(`plain ${duration(now.plain_step)}`);
  if (now.floor) compared.push(`floor ${duration(now.floor)}`);
  const host = parts.filter(([name]) => name !== "forward" && name !== "draft").reduce((sum, [, seconds]) => sum + seconds, 0);
  if (total) compared.push(`host ${Math.round((100 * host) / total)}%`);
  $("note-step").textContent = compared.join(" · ");
}

function showLedger(now) {
  const saved = now.plain - now.spent;
  $("live-saved").textContent = now.spent ? `${saved < 0 ? "−" : "+"}${duration(Math.abs(saved))}` : "–";
  const most = Math.max(now.spent, now.plain, 1e-9);
  const bar = (name, seconds) => {
    const fill = element("span", { class: `fill ${name}` });
    fill.style.width = `${(100 * seconds) / most}%`;
    return element("p", {}, element("span", { class: "name" }, name), fill, element("span", { class: "value" }, duration(seconds)));
  };
  $("ledger").replaceChildren(bar("spent", now.spent), bar("plain", now.plain));
  $("note-ledger").textContent = `${saved < 0 ? "lost" : "saved"} since the start; ${now.balance.toFixed(1)} plain steps may be lost on trials`;
}

function showPositions(now) {
  const earlier = history.before(LONGER);
  const series = [];
  for (const [name, counts] of Object.entries(now.positions)) {
    const older = earlier.positions[name] ?? [];
    const values = counts.map(([tried, accepted], place) => {
      const [triedBefore, acceptedBefore] = older[place] ?? [0, 0];
      return tried - triedBefore >= FEW ? (accepted - acceptedBefore) / (tried - triedBefore) : null;
    });
    while (values.length && values.at(-1) === null) values.pop();
    if (values.length) series.push({ name, values });
  }
  series.sort((one, other) => one.name.localeCompare(other.name));
  const best = series.map((each) => `${each.name} ${Math.round(100 * (each.values[0] ?? 0))}% at position 1`).join(", ");
  shareLines($("chart-positions"), series, { label: `Acceptance by position: ${best || "no drafts"}`, xLabel: "position" });
}

function showDepths(now) {
  const earlier = history.before(LONGER);
  const counts = Object.entries(now.depths).map(([name, count]) => [name, count - (earlier.depths[name] ?? 0)]);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const order = (name) => (name === "more" ? Infinity : Number(name));
  const bars = counts.filter(([, count]) => count > 0).sort(([one], [other]) => order(one) - order(other))
    .map(([name, count]) => ({ name: name === "0" ? "plain" : name, share: count / total, className: name === "0" ? "bar-plain" : "bar-fill" }));
  const label = bars.map((bar) => `${bar.name}: ${Math.round(100 * bar.share)}%`).join(", ");
  shareBars($("chart-depths"), bars, { label: `Depth chosen: ${label || "nothing decoded"}`, xLabel: "draft tokens for a request in a step" });
}

function showRequests({ shown }) {
  const rows = shown.map((each) => {
    const row = element("tr", {}, ...[
      `${each.id}`, each.mode, each.prompt, each.tokens, each.seconds.toFixed(1), each.proposers.join(", ") || "–",
      each.drafted ? `${each.accepted} of ${each.drafted}` : "–", each.speedup === null ? "–" : times(each.speedup),
    ].map((value) => element("td", {}, `${value}`)));
    if (each.speedup !== null) row.dataset.state = each.speedup < LOSES ? "loses" : each.speedup >= PAYS ? "pays" : "even";
    return row;
  });
  $("requests").replaceChildren(...(rows.length ? rows : [emptyRow(8, "nothing runs")]));
}

const emptyRow = (columns, text) => element("tr", {}, element("td", { colSpan: columns, class: "note" }, text));

function showTrace(steps) {
  const rows = steps.toReversed().map((step) => {
    const drafts = element("td", { class: "left" });
    for (const [method, length, accepted] of step.drafts.slice(0, 4)) {
      const swatch = element("span", { class: "swatch" });
      swatch.dataset.proposer = method;
      drafts.append(element("span", { class: "chip" }, swatch, `${method} ${accepted}/${length}`));
    }
    if (step.drafts.length > 4) drafts.append(`and ${step.drafts.length - 4} more`);
    return element("tr", {}, element("td", {}, `${step.step}`), element("td", { class: "left" }, step.reason), drafts,
      element("td", {}, `${step.emitted}, ${step.expected.toFixed(1)}`),
      element("td", {}, `${duration(step.seconds)}${step.plain ? `, ${duration(step.plain)}` : ""}`));
  });
  $("trace").replaceChildren(...(rows.length ? rows : [emptyRow(5, "no decision since you looked")]));
}
