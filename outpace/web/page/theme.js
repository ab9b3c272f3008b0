// Light or dark: as the system, or as the switch says. Used by the page and by /docs.

const STORE = "outpace-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const NAMES = { system: "as the system", light: "light", dark: "dark" };

export function prepareTheme(button) {
  const current = () => localStorage.getItem(STORE) ?? "system";
  const apply = () => {
    const theme = current();
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-label", `Colours: ${NAMES[theme]}`);
    button.title = `Colours: ${NAMES[theme]}`;
  };
  button.addEventListener("click", () => {
    localStorage.setItem(STORE, NEXT[current()] ?? "system");
    apply();
  });
  apply();
}
