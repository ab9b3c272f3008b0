// The settings of requests. Controls with the same data-setting show the same value, in whichever view they are.

const STORE = "outpace-settings";
const values = { mode: "auto", method: "", temperature: "", seed: "", max_tokens: "", max_depth: "", system: "" };
let isChosen = false; // by the user, not the server

export function prepareSettings() {
  try {
    Object.assign(values, JSON.parse(sessionStorage.getItem(STORE) ?? "{}"));
  } catch { /* not ours: start afresh */ }
  isChosen = sessionStorage.getItem(STORE) !== null;
  show();
  document.addEventListener("input", (event) => {
    const name = event.target.dataset?.setting;
    if (!name) return;
    values[name] = event.target.value;
    isChosen = true;
    sessionStorage.setItem(STORE, JSON.stringify(values));
    show(event.target);
  });
}

function show(except = null) {
  for (const control of document.querySelectorAll("[data-setting]")) {
    const value = values[control.dataset.setting];
    if (control.type === "radio") control.checked = control.value === value;
    else if (control !== except) control.value = value;
  }
}

/** What the server says about itself: methods to choose from, defaults to show. */
export function offer(about) {
  for (const select of document.querySelectorAll("select[data-setting=method]")) {
    const options = about.methods.map((name) => new Option(name, name));
    select.replaceChildren(new Option("any method", ""), ...options);
  }
  if (!about.methods.includes(values.method)) values.method = "";
  if (!isChosen) values.mode = about.speculation;
  for (const control of document.querySelectorAll("[data-setting=temperature]")) {
    control.placeholder = `${about.sampling.temperature ?? 1}`;
  }
  for (const control of document.querySelectorAll("[data-setting=max_depth]")) {
    control.placeholder = `${about.depth.auto}`;
  }
  show();
}

const number = (text) => (text === "" || Number.isNaN(Number(text)) ? undefined : Number(text));

/** The fields of a request; JSON leaves out what is undefined. */
export function fields({ mode = values.mode } = {}) {
  const method = mode === "off" ? undefined : values.method || undefined;
  return {
    speculation: { mode, method, max_depth: number(values.max_depth) },
    temperature: number(values.temperature),
    seed: number(values.seed),
    max_completion_tokens: number(values.max_tokens),
  };
}

export const systemMessages = () => (values.system.trim() ? [{ role: "system", content: values.system }] : []);
