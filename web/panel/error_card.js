// The error that ended a run: of which device, in which node, and what it says.

import { api } from "../../../scripts/api.js";
import { button, copyButton, make } from "./elements.js";
import { nodeTitle } from "./graphs.js";
import { deviceName } from "./ranks.js";
import { languageNow, spoken, t } from "./texts.js";

const FOLDERS = /(?<![\w/.])\/(?:[^\s/]+(?: [^\s/]+)*\/)+/g; // as in cp_runtime/controller/journal.py

let dismissed = null; // the time of the error that need not be shown any more
let own = null; // ComfyUI's message to the page that queued the prompt
let refresh = () => {};

api.addEventListener("execution_error", ({ detail }) => {
  own = detail;
  refresh();
});

/** What an error says. The status has no folders, since everyone reads it; whoever queued the prompt sees them, in commands to copy. */
function messageOf(error) {
  const whole = own?.exception_message?.split("\n\n")[0].trim();
  const same = String(own?.node_id) === String(error.node?.id) && whole?.replace(FOLDERS, "") === spoken(error);
  return same ? whole : spoken(error);
}

/** The last error. Kept until it is dismissed or there is another, so that it can be read and selected while events come in. */
export function errorCard() {
  const title = make("strong");
  const text = make("pre");
  const copy = copyButton(text);
  const dismiss = button("pi-times", () => {
    dismissed = shown;
    card.hidden = true;
  });
  dismiss.say(t("dismiss"));
  text.tabIndex = 0; // it scrolls
  const card = make("div", "cp-error", null, title, text, make("div", "cp-buttons", null, copy, dismiss));
  card.setAttribute("role", "alert");
  let shown = null;
  let last = null;
  card.update = (error) => {
    last = error;
    card.hidden = !error || error.time === dismissed;
    if (!error || (error.time === shown && text.textContent === messageOf(error))) return;
    shown = error.time;
    title.textContent = titleOf(error);
    text.textContent = messageOf(error);
    copy.say(t("copy"));
  };
  refresh = () => card.update(last);
  return card;
}

/** The last errors, of runs before good ones too, the newest first. Made anew only where there is another. */
export function pastErrors() {
  const list = make("div", "cp-lists");
  const element = make("details", "cp-past", null, make("summary", "", t("past_errors")), list);
  let newest = null;
  element.update = (errors) => {
    element.hidden = !errors.length;
    if (!errors.length || errors[0].time === newest) return;
    newest = errors[0].time;
    list.replaceChildren(...errors.map((error) => make("div", "cp-facts", null, make("strong", "", titleOf(error)), textOf(error))));
  };
  return element;
}

function textOf(error) {
  const text = make("pre", "", spoken(error));
  text.tabIndex = 0; // it scrolls
  return text;
}

function titleOf(error) {
  const parts = [new Date(error.time * 1000).toLocaleTimeString(languageNow())];
  if (error.rank !== null) parts.push(deviceName(error.rank, error.device));
  if (error.node) parts.push(t("in_node", { node: nodeTitle(error.node), id: error.node.id }));
  return t("error_title", { what: parts.join(" · ") });
}
