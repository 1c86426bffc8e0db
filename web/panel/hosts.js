// Other computers: a field that has the server look whether one can work for this one, how each is, and what CP Config takes.

import { choice, foundDevices, labelOf } from "../devices.js";
import { button, copyButton, make } from "./elements.js";
import { spoken, t } from "./texts.js";

const COLOURS = { ready: "computing", working: "computing", checking: "loading" }; // those of the ranks' states

/** The field and the list; `update` takes the status. `check` has the server look, and returns whether it has. */
export function otherComputers(check) {
  const name = make("input", "cp-field");
  name.placeholder = "gpubox";
  name.setAttribute("aria-label", t("hosts.name"));
  const look = button("pi-search", () => form.requestSubmit());
  look.say(t("hosts.check"));
  const form = make("form", "cp-buttons", null, name, look);
  const list = make("div", "cp-lists");
  const element = make("details", "cp-hosts", null, make("summary", "", t("hosts.title")), form, make("p", "cp-note", t("hosts.hint")), list);
  const lines = new Map(); // by host: their buttons keep the focus
  let here = []; // devices of this computer
  let status = null;

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const host = name.value.trim();
    if (host && (await check(host)) && name.value.trim() === host) name.value = "";
  });

  /** What CP Config names now, with a device of this computer, which it has to begin with. */
  function namesNow() {
    const { on, others } = choice(status.settings, here);
    return [...(on.length ? on : here.map((device) => device.name)), ...others];
  }

  function show() {
    element.hidden = !status;
    const hosts = status?.hosts ?? [];
    for (const [host, line] of lines) {
      if (hosts.some((each) => each.host === host)) continue;
      line.remove();
      lines.delete(host);
    }
    for (const each of hosts) {
      if (!lines.has(each.host)) {
        lines.set(each.host, lineOf(each.host));
        list.append(lines.get(each.host));
      }
      lines.get(each.host).update(each, namesNow());
    }
  }

  element.update = (now) => {
    status = now;
    show();
  };
  foundDevices().then(
    ({ devices }) => {
      here = devices;
      show();
    },
    () => {}, // then the text names the host's devices only
  );
  return element;
}

/** A host; its `update` takes what the server says of it, and the names of the devices that compute now. */
function lineOf(host) {
  const state = make("span");
  const own = make("p", "cp-name cp-names");
  const reason = make("pre");
  reason.tabIndex = 0; // it scrolls
  const text = make("code");
  const put = make("div", "cp-facts", null, make("p", "cp-note", t("hosts.put")), make("div", "cp-rank", null, text, copyButton(text)));
  const element = make("div", "cp-facts", null, make("div", "cp-rank", null, make("strong", "", host), state), own, reason, put);
  element.dataset.host = host;
  element.update = (now, names) => {
    state.textContent = t(`hosts.state.${now.state}`);
    state.className = `cp-state cp-${COLOURS[now.state] ?? "failed"}`;
    own.textContent = now.devices.map(labelOf).join("\n");
    const why = spoken({ message: now.reason, translations: now.translations });
    if (reason.textContent !== why) reason.textContent = why; // it may be selected
    reason.hidden = !now.reason;
    const further = now.devices.map((device) => device.name).filter((name) => !names.includes(name));
    text.textContent = [...names, ...further].join(", ");
    own.hidden = put.hidden = !now.devices.length;
  };
  return element;
}
