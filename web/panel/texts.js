// What the panel and the nodes say, in ComfyUI's language. The texts are in locales/<language>/main.json; ComfyUI hands them out.

import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

const GROUP = "contextParallel"; // texts of all packs are in one object
const LANGUAGE = "Comfy.Locale";

let texts = {}; // by language
let language = null; // that was chosen since the page opened
let loading = null;

/** Fetch the texts, once for all who wait for them; again if the server was away. */
export function loadTexts() {
  loading ??= api.getCustomNodesI18n().then(
    (all) => {
      texts = all;
    },
    () => {
      loading = null;
    },
  );
  return loading;
}

/** Have `changed` called when another language is chosen. */
export function onLanguage(changed) {
  app.ui.settings.addEventListener(`${LANGUAGE}.change`, ({ detail }) => {
    language = detail.value; // the setting itself comes after the event
    changed();
  });
}

/** ComfyUI's language, such as "en" or "zh-TW". */
export function languageNow() {
  return language ?? app.extensionManager.setting.get(LANGUAGE) ?? "en";
}

/** The text of a key such as "state.idle", with `values` in its {places}; null where no language has it. */
export function find(key, values = {}) {
  const chosen = languageNow();
  for (const each of [chosen, chosen.split("-")[0], "en"]) {
    const text = key.split(".").reduce((group, name) => group?.[name], texts[each]?.[GROUP]);
    if (typeof text === "string") return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
  }
  return null;
}

/** The same; the key itself where there is no text. */
export function t(key, values) {
  return find(key, values) ?? key;
}

/** A sentence of the server in ComfyUI's language, where it has it. */
export function spoken({ message, translations }) {
  const chosen = languageNow();
  return translations?.[chosen] ?? translations?.[chosen.split("-")[0]] ?? message;
}
