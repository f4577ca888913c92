// The page's start: sign-in, the two views, the colours.

import { ApiError, call, keepKey, signedInKey } from "./api.js";
import { LiveView } from "./live.js";
import { $, make } from "./parts.js";
import { Parameters } from "./parameters.js";
import { Playground } from "./playground.js";

const VIEWS = ["playground", "live"];
let live = null;
let playground = null;

function showView() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "playground";
  for (const name of VIEWS) {
    $(name).hidden = name !== view;
    const link = document.querySelector(`[data-view=${name}]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "live" ? "Live engine · pagestream" : "Playground · pagestream";
  // Nobody looks while another view or another tab is in front, and then nothing is sent.
  if (view === "live" && !document.hidden) live?.open();
  else live?.close();
}

/** Show the sign-in where that is what the error asks for; returns whether it was. */
function askForKey(error) {
  if (!(error instanceof ApiError) || error.status !== 401) return false;
  $("sign-in-error").textContent = signedInKey() ? "This key is not valid." : "";
  keepKey("");
  if (!$("sign-in").open) $("sign-in").showModal();
  $("key").focus();
  return true;
}

/** All that a key is needed for. */
async function load() {
  const { data } = await (await call("v1/models")).json();
  playground ??= new Playground({
    model: () => $("model").value, parameters: new Parameters(await (await call("v1/parameters")).json()), onRefused: askForKey,
  });
  $("model").replaceChildren(...data.map((each) => make("option", { value: each.id }, each.id)));
  $("sign-out").hidden = !signedInKey();
  showView();
}

async function signIn(event) {
  event.preventDefault();
  keepKey($("key").value);
  try {
    await load();
    $("key").value = "";
    $("sign-in").close();
    $("prompt").focus();
  } catch (error) {
    if (!askForKey(error)) $("sign-in-error").textContent = error.message;
  }
}

const THEMES = ["", "light", "dark"];
const THEME_NAMES = { "": "Colours: as the system has them", light: "Colours: light", dark: "Colours: dark" };
const THEME_SIGNS = { "": "◐", light: "○", dark: "●" };

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("pagestream-theme", theme);
  $("theme").textContent = THEME_SIGNS[theme];
  $("theme").setAttribute("aria-label", THEME_NAMES[theme]);
  $("theme").title = THEME_NAMES[theme];
  live?.redraw();
}

async function start() {
  setTheme(localStorage.getItem("pagestream-theme") ?? "");
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme ?? "";
    setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  });
  if (matchMedia("(max-width: 900px)").matches) $("parameters-box").open = false;
  live = new LiveView({ onRefused: askForKey });
  addEventListener("hashchange", showView);
  document.addEventListener("visibilitychange", showView);
  $("sign-in-form").addEventListener("submit", signIn);
  $("sign-in").addEventListener("cancel", (event) => event.preventDefault());
  $("sign-out").addEventListener("click", () => {
    keepKey("");
    location.reload();
  });
  try {
    await load();
  } catch (error) {
    if (!askForKey(error)) $("status").textContent = error.message;
    showView();
  }
}

start();
