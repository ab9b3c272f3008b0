// The server's event stream: kept open while the page is visible, found again when it is lost.

import { call, events } from "./api.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5000;

/** Calls `onAbout` once per connection, `onLive` for every snapshot, and `onState` with live, lost or denied. */
export function watch({ onAbout, onLive, onState }) {
  let controller = null;
  let pause = FIRST_PAUSE;
  let timer = null;

  async function connect() {
    clearTimeout(timer);
    timer = null;
    if (controller || document.visibilityState === "hidden") return;
    const mine = controller = new AbortController();
    let isDenied = false;
    try {
      const response = await call("v1/outpace/events", { signal: mine.signal });
      for await (const { name, data } of events(response)) {
        pause = FIRST_PAUSE;
        if (name === "about") onAbout(JSON.parse(data));
        else if (name === "live") {
          onState("live");
          onLive(JSON.parse(data));
        }
      }
    } catch (error) {
      isDenied = error.status === 401;
    }
    if (controller === mine) controller = null;
    if (mine.signal.aborted) return;
    onState(isDenied ? "denied" : "lost");
    if (!isDenied) {
      timer = setTimeout(connect, pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "hidden") {
      controller?.abort();
      controller = null;
    } else {
      connect();
    }
  });
  addEventListener("online", connect);
  connect();
  return connect;
}
