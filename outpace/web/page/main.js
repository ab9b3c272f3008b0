// The page: which view is shown, the key, the connection, the colours.

import { onKeyWanted } from "./api.js";
import { prepareCards } from "./answer.js";
import { prepareChat } from "./chat.js";
import { compareWith, prepareCompare } from "./compare.js";
import { $, times } from "./dom.js";
import { addSnapshot, setAbout, showLive } from "./live.js";
import { offer, prepareSettings } from "./settings.js";
import { prepareTheme } from "./theme.js";
import { watch } from "./watch.js";

const VIEWS = ["chat", "compare", "live"];

function showView() {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return; // the link that skips the head
  const view = VIEWS.includes(wanted) ? wanted : "chat";
  for (const each of VIEWS) $(`view-${each}`).hidden = each !== view;
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "chat" ? "Outpace" : `Outpace: ${view}`;
  if (view === "live") showLive();
}

function askForKey(reason) {
  const dialog = $("key-dialog");
  const first = "This server wants a key. It stays in this tab and is forgotten when the tab closes.";
  $("key-reason").textContent = reason || first;
  $("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const end = (key) => {
      done.abort();
      dialog.close();
      resolve(key);
    };
    const done = new AbortController();
    const listen = (target, name, action) => target.addEventListener(name, action, { signal: done.signal });
    listen($("key-form"), "submit", (event) => {
      event.preventDefault();
      end($("key").value.trim());
    });
    listen($("key-cancel"), "click", () => end(null));
    listen(dialog, "cancel", () => end(null));
  });
}

const STATES = {
  live: ["connected", ""],
  lost: ["not reachable", "The server cannot be reached. It is tried again every few seconds."],
  denied: ["no key", "The server wants a key. "],
};

function onState(state) {
  const pulse = $("pulse");
  if (pulse.dataset.state === state) return;
  pulse.dataset.state = state;
  const [short, long] = STATES[state];
  $("pulse-state").textContent = short;
  $("pulse-figures").textContent = "";
  $("notice").hidden = !long;
  $("notice").textContent = long;
  if (state === "denied") {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = "Give it a key";
    button.addEventListener("click", () => reconnect());
    $("notice").append(button);
  }
}

function onLive(snapshot) {
  const { rate, speed, running } = addSnapshot(snapshot);
  const parts = [];
  if (running) parts.push(`${rate.toFixed(0)} tokens/s`);
  if (running && speed !== null) parts.push(`${times(speed)} plain`);
  $("pulse-figures").textContent = parts.length ? ` · ${parts.join(" · ")}` : "";
}

function onAbout(about) {
  setAbout(about);
  offer(about);
  const exact = about.exact_to_the_bit ? "exact to the bit" : "exact up to rounding";
  $("about").textContent = `${about.model} · ${about.backend} backend, ${about.lossy ? "LOSSY by default" : exact} · Outpace ${about.version}`;
}

prepareTheme($("theme"));
prepareSettings();
prepareCards();
prepareChat({ onCompare: compareWith });
prepareCompare();
onKeyWanted(askForKey);
addEventListener("hashchange", showView);
showView();
const reconnect = watch({ onAbout, onLive, onState });
