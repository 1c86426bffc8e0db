// The ranks by the names of their devices, and what each is doing.

import { hint, make } from "./elements.js";
import { find, t } from "./texts.js";

const GPUS = ["cuda", "xpu"];

/** "GPU 1" for cuda:1, "GPU 1 (gpubox)" for gpubox/cuda:1, "Process 0" for a rank on the CPU: all of those have the same device. */
export function deviceName(rank, device) {
  const [own, host] = (device ?? "cpu").split("/").reverse();
  const [kind, index] = own.split(":");
  const name = kind === "cpu" ? t("process", { rank }) : `${GPUS.includes(kind) ? "GPU" : kind.toUpperCase()} ${index ?? 0}`;
  return host ? `${name} (${host})` : name;
}

/** A line for each rank. The one that failed is marked; those that were ended with it say why. */
export function rankList(now) {
  const culprit = now.ranks.find((rank) => rank.culprit);
  const list = make("div", "cp-ranks");
  for (const rank of now.ranks) {
    const [state, device] = [find(`state.${rank.state}`) ?? rank.state, deviceName(rank.rank, rank.device)];
    const word = rank.idle && rank.state === "computing" ? t("left_out") : state;
    const line = make("div", "cp-rank", null, make("strong", "", device), make("span", `cp-state cp-${rank.state}`, word));
    line.dataset.rank = rank.rank;
    line.classList.toggle("cp-culprit", Boolean(rank.culprit));
    const ended = rank.state === "ended" && culprit ? t("hint.ended", { device: deviceName(culprit.rank, culprit.device) }) : null;
    hint(line, ended ?? t("hint.rank", { rank: rank.rank, device: rank.device })).dataset.key = `line ${rank.rank}`;
    list.append(line);
  }
  return list;
}
