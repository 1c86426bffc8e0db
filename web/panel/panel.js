// The panel itself. Only what has nothing to click or select is made anew by an event.

import { aloneIn } from "../devices.js";
import { details } from "./details.js";
import { deviceCards } from "./device_cards.js";
import { button, hint, labelledSwitch, make, renew, seconds } from "./elements.js";
import { errorCard, pastErrors } from "./error_card.js";
import { otherComputers } from "./hosts.js";
import { promptBar } from "./prompt_bar.js";
import { rankList } from "./ranks.js";
import { nodeTitle } from "./graphs.js";
import { find, t } from "./texts.js";
import { label, toggle, usesAll } from "../use_all_gpus.js";

const BUSY = ["starting", "loading", "computing"];
const SETTLED = 1000; // milliseconds that a state lasts before it is read aloud: between two calls the ranks are idle

/** The panel; its `update` takes the status and what this page is doing about the workers at the moment. */
export function makePanel({ restart, measure, prefer, check }) {
  const speed = hint(make("div", "cp-speed"), t("hint.speed"));
  const about = make("p", "cp-activity cp-about"); // the whole sentence, where the speed above is a part of it
  const measuring = hint(button("pi-stopwatch", () => measure(stoppable)), t("hint.measure"));
  const first = make("div", "cp-head", null, speed, measuring);
  const decoded = hint(make("p", "cp-activity"), t("hint.vae"));
  const prompt = promptBar();
  const held = hint(make("p", "cp-activity cp-names"), t("hint.models"));
  const headline = make("div", "cp-headline");
  const live = make("div", "cp-live");
  live.setAttribute("role", "status");
  const again = hint(button("pi-refresh", restart), t("hint.restart"));
  const head = make("div", "cp-head", null, headline, again); // above what may be long
  const activity = make("p", "cp-activity");
  const use = button("pi-bolt", toggle);
  const devices = deviceCards(prefer);
  const error = errorCard();
  const body = make("div", "cp-body");
  const list = make("div", "cp-lists");
  const byItself = labelledSwitch(t("measure_by_itself"), t("hint.measure_by_itself"), (measure) => prefer({ measure }));
  const past = pastErrors();
  const more = make("details", "cp-details", null, make("summary", "", t("details")), list, byItself, past);
  const hosts = otherComputers(check);
  const element = make("div", "cp-panel", null, first, about, decoded, prompt, held, head, activity, error, use, devices, body, hosts, more, live);
  element.dataset.testid = "context-parallel-panel";

  // Not every way to open a graph has an event.
  element.addEventListener("pointerenter", () => use.hidden || use.say(label()));

  let stoppable = false; // whether a measurement waits or goes on
  let tick = null; // while workers start, for the seconds that they have taken
  let told = null; // the state that was read aloud, or will be in a moment
  let telling = null;
  element.update = (now, { restarting, skew }) => {
    const state = restarting ? "starting" : now?.state;
    const working = Boolean(now) && now.state !== "off";
    // A run that has begun knows its speed after its first calls.
    const known = now?.speed ?? { parts: { cases: [now?.no_speed ?? "no_run"], unit: "device" } };
    first.hidden = !now || (!now.speed && BUSY.includes(state));
    about.textContent = speedOf(known);
    speed.textContent = briefly(known) ?? about.textContent;
    about.hidden = first.hidden || ["", speed.textContent].includes(about.textContent);
    stoppable = Boolean(known.measuring);
    measuring.hidden = !stoppable && known.parts.cases.includes("one_device");
    const ask = known.parts.count ? t("measure_again") : t("measure");
    measuring.say(stoppable ? t("measure_cancel") : ask);
    const took = [];
    if (now?.last_vae_call) took.push(t("vae_took", { time: seconds(now.last_vae_call.seconds) }));
    if (now?.last_upscale_call) took.push(t("upscale_took", { time: seconds(now.last_upscale_call.seconds) }));
    decoded.textContent = took.join(", ");
    decoded.hidden = !decoded.textContent;
    prompt.update(now?.last_prompt ?? null);
    held.textContent = Object.entries(now?.memory ?? {}).map(heldOf).join("\n");
    held.hidden = !held.textContent || state === "failed";
    headline.textContent = now ? (find(`state.${state}`) ?? state) : t("waiting_for_server");
    headline.className = `cp-headline cp-${state}`;
    if (state !== told) {
      told = state;
      clearTimeout(telling);
      telling = setTimeout(() => {
        live.textContent = [headline.textContent, state === "idle" && !first.hidden ? speed.textContent : ""].filter(Boolean).join(": ");
      }, SETTLED);
    }
    headline.title = now?.version ? `Context Parallel ${now.version}` : "";
    again.hidden = !working;
    again.disabled = restarting;
    again.say(restarting ? t("restarting") : t("restart"));
    const say = () => {
      activity.textContent = activityOf(now, state, skew);
      activity.hidden = !activity.textContent;
    };
    say();
    error.update(now?.last_error);
    use.hidden = !now || Boolean(aloneIn(now)) || !error.hidden || BUSY.includes(state);
    if (!use.hidden) use.say(label()); // it looks at the whole graph, and events come several times a second
    clearInterval(tick);
    if (now?.starting) tick = setInterval(() => (element.isConnected ? say() : clearInterval(tick)), 1000);
    devices.update(now);
    hosts.update(now);
    renew(body, working ? [rankList(now)] : []);
    renew(list, working ? details(now) : []);
    byItself.set(now?.settings.measure ?? true);
    past.update(now?.errors ?? []);
    more.hidden = !now;
  };
  return element;
}

/** The words of the server, in the user's language: the same cases and numbers; empty where the title says it all. */
function speedOf(speed) {
  if (speed.measuring) return t("speed.measuring");
  const { cases, unit, obstacle } = speed.parts;
  const values = { ...speed.parts, unit: t(`unit.${unit}`), obstacle: obstacle && t(`obstacle.${obstacle}`) };
  return cases.reduce((text, each) => find(`speed.${each}`, { ...values, speed: text }) ?? "", "");
}

/** The speed in a line; null where the sentence is one. */
function briefly({ measuring, parts }) {
  return measuring ? null : find(`title.${parts.cases[0]}`, parts);
}

/** What each device holds of a model. */
function heldOf([model, parts]) {
  return `${model}: ${t(`held.${parts.case}`, { ...parts, unit: t(`unit.${parts.unit}`) })}`;
}

/** What the workers do at the moment, in a line. `skew` is what this clock is ahead of the server's, in seconds. */
function activityOf(now, state, skew) {
  if (now?.starting) return startOf(now, skew);
  const alone = state === "off" && aloneIn(now);
  if (alone) return t(`alone.${alone.case}`, alone);
  if (state === "off" && !usesAll()) return t("use_all.first");
  if (state === "off" || state === "failed") return t(`next.${state}`);
  if (now?.loading) return loadingOf(now.loading);
  if (now?.compiling) return t("compiling");
  if (!now?.pace) return "";
  const pace = t("per_call", { time: seconds(now.pace) });
  return now.node ? t("node_at_work", { pace, node: nodeTitle(now.node) }) : pace;
}

function loadingOf({ model, part }) {
  return part === null ? t("loading", { model }) : t("loading_part", { model, part: Math.round(100 * part) });
}

function startOf({ starting, world_size }, skew) {
  const soFar = Math.max(0, Math.round(Date.now() / 1000 - skew - starting.since));
  const values = { count: world_size, seconds: soFar, stage: find(`stage.${starting.stage}`) ?? starting.stage };
  if (starting.last_took === null) return t("starting", values);
  return t("starting_again", { ...values, last: Math.round(starting.last_took) });
}
