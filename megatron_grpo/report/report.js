// The page: reads the embedded data, lays out the sections, keeps the reader's choices when new data arrives.
const CHART_SECTIONS = [
  {id: "learning", title: "Learning", about: "Is the policy getting better, and at what length?", charts: [
    {title: "Reward", metrics: ["reward/mean"], unit: "mean reward of the samples", need: "written by every training step"},
    {title: "Held-out accuracy", metrics: ["eval/accuracy"], unit: "share of held-out prompts", zero: true, need: "evaluate with --eval-interval"},
    {title: "Response length", metrics: ["response_length/mean"], unit: "tokens", zero: true, need: "written by every training step"},
    {title: "Truncated responses", metrics: ["samples/truncated"], unit: "share of samples", zero: true, need: "written by every training step"},
    {title: "Entropy", metrics: ["entropy"], unit: "nats per token", zero: true, need: "the loss did not compute it"},
    {title: "Loss", metrics: ["loss"], unit: "loss", need: "written by every training step"}]},
  {id: "update", title: "Policy update", about: "How far each update moves the policy, and how often the clip rule holds it back.", charts: [
    {title: "Clip fractions", metrics: ["clip_frac_low", "clip_frac_high", "clip_frac_dual", "clip_frac_cov"], unit: "share of tokens", zero: true, need: "the surrogate in use clips nothing"},
    {title: "KL to reference", metrics: ["ref_kl"], unit: "nats per token (k3)", zero: true, need: "needs a reference model: --use-kl-loss or --kl-coef"},
    {title: "Movement from the old policy", metrics: ["ppo_kl"], unit: "nats per token (k1)", need: "written by every training step"},
    {title: "Effective sample size of the ratio", metrics: ["ratio_ess"], unit: "share of tokens", one: true, need: "written by every training step"},
    {title: "Gradient norm", metrics: ["grad_norm"], unit: "L2 norm", zero: true, need: "written by every training step"},
    {title: "Learning rate", metrics: ["learning_rate"], unit: "per step", zero: true, need: "written by every training step"}]},
  {id: "mismatch", title: "Engine agreement", about: "Train-versus-rollout mismatch: the log-probabilities the trainer computes against those of the engine that sampled the tokens.", lead: agreement, charts: [
    {title: "Mismatch KL, k3", metrics: ["mismatch_k3"], unit: "nats per token, log scale", log: true, need: "needs the engine's log-probs beside the trainer's own"},
    {title: "Mismatch KL, k1", metrics: ["mismatch_k1"], unit: "nats per token", need: "needs the engine's log-probs beside the trainer's own"},
    {title: "Extreme tokens, F(2)", metrics: ["mismatch_f2"], unit: "share with ratio beyond 2", zero: true, need: "needs the engine's log-probs beside the trainer's own"},
    {title: "Effective sample size, trainer / engine", metrics: ["mismatch_ratio_ess"], unit: "share of tokens", one: true, need: "needs the engine's log-probs beside the trainer's own"},
    {title: "Largest log-prob difference", metrics: ["mismatch_abs_max"], unit: "nats, log scale", log: true, need: "needs the engine's log-probs beside the trainer's own"},
    {title: "What the correction removed", metrics: ["masked", "tis_clip_frac"], unit: "share of tokens", zero: true, need: "needs a correction: --use-tis or a rejection rule"}]},
  {id: "replay", title: "Routing replay", about: "How the experts that the engine used differ from those the trainer's routers would choose.", extra: layerProfile, charts: [
    {title: "Routers that differ", metrics: ["routing/router_mismatch"], unit: "share of (token, layer)", zero: true, need: "needs --use-rollout-routing-replay"},
    {title: "Tokens with any difference", metrics: ["routing/token_mismatch"], unit: "share of tokens", zero: true, need: "needs --use-rollout-routing-replay"},
    {title: "Agreement", metrics: ["routing/agreement"], unit: "share of common experts", one: true, need: "needs --use-rollout-routing-replay"},
    {title: "Rows without a route", metrics: ["routing/fallback"], unit: "share of (token, layer)", zero: true, need: "needs --use-rollout-routing-replay"}]},
  {id: "rewards", title: "Reward components", about: "Each named reward by itself, before shaping.", charts: runs => names(runs).filter(n => /^reward\/.+\/mean$/.test(n))
    .map(n => ({title: n.slice(7, -5), metrics: [n], unit: "mean of the samples"})), none: "No named rewards (reward/<name>/mean) in these runs."},
  {id: "sampling", title: "Sampling", about: "Where every sample went, and how many groups carry a learning signal.", extra: books, charts: [
    {title: "Groups with zero spread", metrics: ["groups/zero_std"], unit: "share of groups", zero: true, need: "written by every training step"},
    {title: "Wasted and off-policy tokens", metrics: ["rollout/tokens_wasted", "rollout/tokens_off_policy"], unit: "tokens in a step", zero: true, need: "written by every training step"}]},
  {id: "time", title: "Time", about: "Seconds of each phase of a step, and the speed of the two long ones.", extra: phases, charts: [
    {title: "Generation speed", metrics: ["speed/rollout"], unit: "sampled tokens a second", zero: true, need: "needs rollout/tokens_generated and the seconds of `rollout`"},
    {title: "Training speed", metrics: ["speed/train"], unit: "trained tokens a second", zero: true, need: "needs tokens/trained and the seconds of `train`"}]},
];
const COLOURINGS = {
  gap: {label: "train / rollout gap", value: t => t[3] === null || t[4] === null ? null : t[3] - t[4], ends: ["engine likelier", "trainer likelier"]},
  ratio: {label: "policy ratio, new / old", value: t => t[2] === null || t[3] === null ? null : t[2] - t[3], ends: ["less likely now", "likelier now"]},
  surprise: {label: "surprise, −log p", value: t => { const p = t[3] ?? t[2] ?? t[4]; return p === null ? null : -p; }, ends: ["certain", "surprising"]},
  none: {label: "no colour", value: () => null, ends: ["", ""]},
};
const view = {off: new Set(), open: new Set(), axis: "step", smooth: 0, histogram: null, sample: {run: 0, step: null, pick: 0, sort: "file", colour: "gap", full: 2, find: ""}};
let data = JSON.parse(document.getElementById("data").textContent);

const names = runs => [...new Set(runs.flatMap(r => Object.keys(r.metrics)))].sort();
const shownRuns = () => data.runs.map((run, index) => ({...run, index})).filter(r => !view.off.has(r.name));
const last = (run, name) => run.metrics[name]?.y.at(-1) ?? null;
const byId = id => document.getElementById(id);

function card(title, code, sub, wide) {
  return el("div", {class: "card" + (wide ? " wide" : "")}, el("h3", {}, title, code ? el("code", {}, code) : null), sub ? el("p", {class: "sub"}, sub) : null);
}

// Hours since the start of a run at a step, between the logged ones by interpolation.
function hoursAt(run, step) {
  const h = run.hours;
  if (!h.length) return null;
  let a = 0, b = h.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (h[m][0] <= step) a = m; else b = m; }
  if (h[a][0] === h[b][0]) return h[a][1];
  return h[a][1] + Math.min(1, Math.max(0, (step - h[a][0]) / (h[b][0] - h[a][0]))) * (h[b][1] - h[a][1]);
}

function drawChart(box, runs, spec) {
  const lines = [], several = spec.metrics.filter(m => runs.some(r => r.metrics[m])).length > 1, place = (run, s) => view.axis === "hours" ? hoursAt(run, s) : s;
  for (const run of runs) spec.metrics.forEach((name, k) => {
    const points = run.metrics[name];
    if (!points) return;
    const keep = points.x.map((_, i) => i).filter(i => place(run, points.x[i]) !== null);
    const gone = run.lost.filter(l => l.name === name).flatMap(l => l.steps);
    lines.push({name: (runs.length > 1 || !several ? run.name : "") + (several ? (runs.length > 1 ? " · " : "") + name.split("/").at(-1) : ""), paint: colour(run.index), dash: several ? DASHES[k % 4] : "",
      xs: keep.map(i => place(run, points.x[i])), ys: keep.map(i => points.y[i]), steps: keep.map(i => points.x[i]), lost: gone.map(s => place(run, s)).filter(x => x !== null), of: points.of});
  });
  box.append(el("div", {class: "legend"}, ...lines.map(l => el("span", {class: "key"}, lineKey(l.paint, l.dash), (runs.length > 1 || several) ? l.name : "last", el("b", {}, number(l.ys.at(-1)))))));
  const rules = data.rules.filter(r => spec.metrics.includes(r.metric));
  lineChart(box, lines, {log: spec.log, zero: spec.zero, one: spec.one, yLabel: spec.unit, xLabel: view.axis === "hours" ? "hours since the first line" : "optimizer step",
    xTitle: view.axis === "hours" ? x => `${number(x)} h` : null, smoothing: view.smooth, integers: view.axis === "step",
    limits: rules.slice(0, 1).flatMap(r => [{at: r.warn, level: "warn", over: r.over}, {at: r.bad, level: "bad", over: r.over}]),
    marks: runs.flatMap(r => r.resumes.map(s => ({x: place(r, s), paint: colour(r.index)})))});
  if (lines.some(l => l.lost.length)) box.append(el("p", {class: "foot"}, `▲ not finite on ${lines.reduce((a, l) => a + l.lost.length, 0)} step(s)`));
}

function chartSection({id, title, about, lead, charts, extra, none}, runs) {
  const specs = typeof charts === "function" ? charts(runs) : charts, there = specs.filter(s => s.metrics.some(m => runs.some(r => r.metrics[m]))), missing = specs.filter(s => !there.includes(s));
  const grid = el("div", {class: "grid"}), part = el("section", {id}, el("h2", {}, title), el("p", {class: "about"}, about), lead ? lead(runs) : null, grid), jobs = [];
  const add = (box, draw) => { grid.append(box); jobs.push(() => draw(box)); };
  for (const spec of there) add(card(spec.title, spec.metrics.filter(m => runs.some(r => r.metrics[m])).join(" ")), box => drawChart(box, runs, spec));
  const more = extra ? extra(runs, add) : [];
  if (missing.length + more.length) part.append(el("div", {class: "missing"}, "Not in these runs:", el("ul", {}, ...[...new Set(missing.map(s => s.need))].map(need => el("li", {}, ...missing.filter(s => s.need === need).flatMap((s, i) => [`${i ? ", " : ""}${s.title} `, el("code", {}, s.metrics.join(" "))]), `: ${need}`)), ...more.map(m => el("li", {}, m)))));
  if (!specs.length && none) part.append(el("p", {class: "missing"}, none));
  return {part, jobs};
}

// One line a run: what alerts.py says of the mismatch metrics together.
function agreement(runs) {
  const tones = {healthy: "good", watch: "warn", broken: "bad", unknown: "note"};
  return el("ul", {class: "alerts verdict"}, ...runs.map(({name, agreement: a}) => el("li", {class: tones[a.state]}, el("span", {class: "level"}, a.state),
    el("div", {}, runs.length > 1 ? el("strong", {}, name + ": ") : null, el("code", {}, a.metric), ` ${a.text}. `, el("span", {class: "why"}, a.advice)))));
}

function layerProfile(runs, add) {
  const lines = runs.map(run => {
    const points = Object.keys(run.metrics).map(n => /^routing\/router_mismatch\/layer_(\d+)$/.exec(n)).filter(Boolean).map(m => [+m[1], last(run, m[0])]).sort((a, b) => a[0] - b[0]);
    return {name: run.name, paint: colour(run.index), dash: "", xs: points.map(p => p[0]), ys: points.map(p => p[1]), steps: points.map(p => p[0]), lost: []};
  }).filter(l => l.xs.length);
  if (!lines.length) return [];
  add(card("Routers that differ, by layer", "routing/router_mismatch/layer_*", "last step"), box => lineChart(box, lines, {zero: true, integers: true, yLabel: "share of tokens", xLabel: "decoder layer", xTitle: x => `layer ${x}`}));
  return [];
}

function books(runs, add) {
  const have = runs.filter(r => r.books.x.length);
  for (const run of have) add(card("Where the samples went", "rollout/samples_*", run.name), box => stackedChart(box, run.books, {yLabel: "samples in a step", xLabel: "optimizer step", unit: ""}));
  return have.length < runs.length ? [`Where the samples went: rollout/samples_* (${runs.filter(r => !have.includes(r)).map(r => r.name).join(", ")})`] : [];
}

function phases(runs, add) {
  const have = runs.filter(r => r.phases.x.length);
  for (const run of have) add(card("Time per phase", "", run.name), box => stackedChart(box, run.phases, {yLabel: "seconds in a step", xLabel: "optimizer step", unit: " s"}));
  for (const run of have) {
    if (run.recent_phases.length) add(card("One step, phase after phase", "", `${run.name}: mean of the last steps, in logged order. Phases that overlap are drawn as if they did not.`), box => waterfall(box, run.recent_phases, run.phases.names));
  }
  return have.length < runs.length ? [`Time per phase: \`seconds\` (${runs.filter(r => !have.includes(r)).map(r => r.name).join(", ")})`] : [];
}

function overview() {
  const duration = r => r.hours.length ? r.hours.reduce((a, p) => Math.max(a, p[1]), 0) : null;
  const clock = h => h === null ? "–" : h < 1 / 60 ? `${Math.round(h * 3600)} s` : h < 1 ? `${Math.round(h * 60)} min` : `${h.toFixed(1)} h`;
  const best = (r, name) => r.metrics[name] ? Math.max(...r.metrics[name].y) : null;
  const columns = [["last step", r => r.last_step ?? "–"], ["elapsed", r => clock(duration(r))],
    ["seconds a step", r => r.recent_phases.length ? number(r.recent_phases.reduce((a, p) => a + p[1], 0)) : "–"], ["reward", r => number(last(r, "reward/mean"))],
    ["held-out accuracy first → last (best)", r => r.metrics["eval/accuracy"] ? `${number(r.metrics["eval/accuracy"].y[0])} → ${number(last(r, "eval/accuracy"))} (${number(best(r, "eval/accuracy"))})` : "–"],
    ["response tokens", r => number(last(r, "response_length/mean"))], ["entropy", r => number(last(r, "entropy"))], ["mismatch k3", r => number(last(r, "mismatch_k3"))],
    ["resumed at", r => r.resumes.length ? r.resumes.slice(-4).join(", ") : "–"]];
  const table = el("table", {}, el("tr", {}, el("th", {}, "run"), ...columns.map(([name]) => el("th", {class: "num"}, name))),
    ...data.runs.map((run, i) => el("tr", {}, el("td", {}, el("button", {class: "run-name" + (view.off.has(run.name) ? " off" : ""), type: "button", title: "show or hide this run in the charts", "aria-pressed": String(!view.off.has(run.name)),
      onclick: () => { view.off.has(run.name) ? view.off.delete(run.name) : view.off.add(run.name); draw(); }}, swatch(colour(i)), run.name)), ...columns.map(([, of]) => el("td", {class: "num"}, String(of(run)))))));
  const blank = data.runs.filter(r => !r.steps).map(r => el("p", {class: "blank"}, el("strong", {}, `${r.name}: nothing to show yet. `),
    r.has_log ? "metrics.jsonl has no readable line: the first is written after the first optimizer step or evaluation." : "The directory has no metrics.jsonl: the trainer writes it to --run-dir (or --save) after its first step. Is this the right directory?"));
  const broken = data.runs.filter(r => r.problems.length).map(r => el("details", {open: true}, el("summary", {}, `${r.name}: ${r.problems.length} problem${r.problems.length > 1 ? "s" : ""} in its files; everything else is shown`),
    el("ul", {class: "problems"}, ...r.problems.map(p => el("li", {}, el("code", {}, p))))));
  return el("section", {id: "runs", style: "margin-top:0"}, el("h2", {}, data.runs.length > 1 ? "Runs" : "Run"), el("div", {class: "card scroll"}, table), ...blank, ...broken);
}

function alerts() {
  const found = data.alerts.filter(a => !view.off.has(a.run)), words = {bad: "Serious", warn: "Warning", note: "Earlier"};
  const gaps = data.runs.filter(r => r.steps && data.unchecked[r.name].length).map(r => el("li", {}, `${r.name}: `, el("code", {}, data.unchecked[r.name].join(", "))));
  return el("section", {id: "alerts"}, el("h2", {}, "Alerts"),
    el("ul", {class: "alerts"}, ...found.map(a => el("li", {class: a.level}, el("span", {class: "level"}, words[a.level]),
      el("div", {}, el("strong", {}, a.title), data.runs.length > 1 ? el("span", {class: "run"}, a.run) : null, el("div", {}, `${a.text} `, el("code", {}, a.metric)),
        el("div", {class: "why"}, `${a.advice} Threshold: ${a.source}.`)))),
      found.length || !data.runs.some(r => r.steps) ? null : el("li", {class: "good"}, el("span", {class: "level"}, "All quiet"), el("div", {}, "No rule is over its threshold."))),
    gaps.length ? el("details", {}, el("summary", {}, "Rules that could not be checked: the run lacks their metric"), el("ul", {class: "problems"}, ...gaps)) : null,
    el("details", {}, el("summary", {}, "All thresholds and where they come from"), el("div", {class: "scroll"}, el("table", {}, el("tr", {}, ...["metric", "", "warning", "serious", "source"].map(t => el("th", {}, t))),
      ...data.rules.map(r => el("tr", {}, el("td", {}, r.title, " ", el("code", {}, r.metric)), el("td", {}, r.over ? "over" : "under"), el("td", {}, String(r.warn)), el("td", {}, String(r.bad)), el("td", {}, r.source)))))));
}

function lengths(runs) {
  const part = el("section", {id: "lengths"}, el("h2", {}, "Response lengths"), el("p", {class: "about"}, "Of the samples that were written to disk for a step.")), jobs = [];
  const steps = [...new Set(runs.flatMap(r => r.samples.map(s => s.step)))].sort((a, b) => a - b);
  if (!steps.length) { part.append(noSamples()); return {part, jobs}; }
  if (!steps.includes(view.histogram)) view.histogram = null;
  const at = view.histogram ?? steps.at(-1), box = card("Length histogram", "", null, true), select = el("select", {"aria-label": "step of the histogram", onchange: e => { view.histogram = +e.target.value; draw(); }},
    ...steps.map(s => el("option", {value: s, selected: s === at}, `step ${s}`)));
  const groups = runs.map(r => ({name: r.name, paint: colour(r.index), values: (r.samples.find(s => s.step === at)?.samples || []).map(s => s.length).filter(n => n > 0)})).filter(g => g.values.length);
  box.append(el("div", {class: "toolbar"}, select), el("div", {class: "legend"}, ...groups.map(g => el("span", {class: "key"}, swatch(g.paint), g.name, el("b", {}, `${g.values.length} samples`)))));
  part.append(box);
  jobs.push(() => groups.length ? histogram(box, groups, {xLabel: "response length, tokens", yLabel: "% of the samples"}) : box.append(el("p", {class: "foot"}, "The samples of this step have no tokens.")));
  return {part, jobs};
}

const noSamples = () => el("p", {class: "blank"}, el("strong", {}, "No samples. "), "The trainer writes samples/step_NNNNNNN.jsonl at evaluations, up to --report-samples of them.");

function samples(runs) {
  const part = el("section", {id: "samples"}, el("h2", {}, "Samples"), el("p", {class: "about"}, "Prompts and responses with their rewards; each token coloured by what the trainer and the engine think of it.")), v = view.sample;
  const have = runs.filter(r => r.samples.length);
  if (!have.length) { part.append(noSamples()); return part; }
  const run = have.find(r => r.index === v.run) || have[0], block = run.samples.find(s => s.step === v.step) || run.samples.at(-1);
  const again = change => () => { change(); part.replaceWith(samples(runs)); };
  const gap = s => s.tokens.reduce((m, t) => t[1] && t[3] !== null && t[4] !== null ? Math.max(m, Math.abs(t[3] - t[4])) : m, 0);
  const orders = {file: null, group: (a, b) => a.group - b.group, reward: (a, b) => b.reward - a.reward, advantage: (a, b) => Math.abs(b.advantage) - Math.abs(a.advantage), length: (a, b) => b.length - a.length, gap: (a, b) => gap(b) - gap(a)};
  const titles = {file: "as written", group: "group", reward: "highest reward", advantage: "largest advantage", length: "longest", gap: "largest gap to the engine"};
  const matching = block.samples.map((s, i) => ({...s, i})).filter(s => !v.find || (s.prompt + "\n" + s.response).toLowerCase().includes(v.find.toLowerCase()));
  if (orders[v.sort]) matching.sort(orders[v.sort]);
  const chosen = matching.find(s => s.i === v.pick) || matching[0];
  const select = (label, options, value, set) => el("label", {}, label + " ", el("select", {onchange: e => again(() => set(e.target.value))()}, ...options.map(([key, text]) => el("option", {value: key, selected: String(key) === String(value)}, text))));
  const find = el("input", {type: "search", placeholder: "find in text", value: v.find, "aria-label": "find in prompts and responses", oninput: e => { v.find = e.target.value; const next = samples(runs); part.replaceWith(next);
    const box = next.querySelector("input[type=search]"); box.focus(); box.setSelectionRange(v.find.length, v.find.length); }});
  part.append(el("div", {class: "toolbar"}, have.length > 1 ? select("run", have.map(r => [r.index, r.name]), run.index, x => { v.run = +x; v.step = null; v.pick = 0; }) : null,
    select("step", run.samples.map(s => [s.step, s.step]), block.step, x => { v.step = +x; v.pick = 0; }), select("order", Object.entries(titles), v.sort, x => { v.sort = x; }), find,
    el("span", {}, `${matching.length} of ${block.samples.length} samples` + (run.sample_steps > run.samples.length ? `; ${run.samples.length} of ${run.sample_steps} written steps are in this page` : ""))));
  let group = null;
  const list = el("div", {class: "card list"});
  for (const s of matching) {
    if (v.sort === "file" || v.sort === "group") { if (s.group !== group) list.append(el("div", {class: "group", title: s.prompt}, `group ${s.group} · ${s.prompt.trim()}`)); group = s.group; }
    list.append(el("button", {type: "button", "aria-pressed": String(s === chosen), onclick: () => { v.pick = s.i; const top = list.scrollTop, next = samples(runs); part.replaceWith(next); next.querySelector(".list").scrollTop = top; }},
      el("span", {class: "top"}, el("span", {}, "reward ", el("b", {}, number(s.reward))), el("span", {}, "adv ", el("b", {}, number(s.advantage))), el("span", {}, `${s.length} tok`), s.status === "completed" ? null : el("span", {}, s.status)),
      el("span", {class: "snip"}, s.response.trim() || "(empty response)")));
  }
  part.append(el("div", {class: "browser"}, list, chosen ? detail(chosen, v, again) : el("p", {class: "blank"}, "No sample has that text.")));
  return part;
}

function detail(s, v, again) {
  const mode = COLOURINGS[v.colour], chip = (name, value) => el("div", {}, name, el("b", {}, value)), one = v.colour === "surprise";
  const choice = (options, value, set, label) => el("select", {"aria-label": label, onchange: e => again(() => set(e.target.value))()}, ...options.map(([k, t]) => el("option", {value: k, selected: String(k) === String(value)}, t)));
  const full = one ? 5 : Math.log(v.full);
  const paint = t => { const x = mode.value(t); return x === null || !t[1] ? "" : `background:rgba(var(--${x > 0 ? "up" : "down"}),${(Math.min(Math.abs(x) / full, 1) * 0.75).toFixed(3)})`; };
  const cut = s.length > s.tokens.length ? Math.floor(s.tokens.length / 2) : -1, box = el("div", {class: "tokens"});
  s.tokens.forEach((t, i) => {
    if (i === cut) box.append(el("span", {class: "cut"}, ` … ${s.length - s.tokens.length} tokens are not in this page … `));
    const x = mode.value(t), extreme = !one && x !== null && t[1] && Math.abs(x) > Math.log(2);
    box.append(el("span", {style: paint(t), class: (t[1] ? "" : "masked") + (extreme ? " extreme" : ""), "data-i": i}, t[0]));
  });
  box.addEventListener("pointermove", event => {
    const i = event.target.dataset?.i;
    if (i === undefined) return tip.hide();
    const t = s.tokens[i], ratio = (a, b) => a === null || b === null ? "–" : number(Math.exp(a - b));
    tip.show(event, el("div", {}, `token ${i} `, el("code", {}, JSON.stringify(t[0])), t[1] ? "" : " (not trained: tool or environment)"), tip.row("", "log p, trainer now", number(t[2])), tip.row("", "log p, old policy", number(t[3])),
      tip.row("", "log p, engine", number(t[4])), tip.row("", "ratio new / old", ratio(t[2], t[3])), tip.row("", "ratio old / engine", ratio(t[3], t[4])));
  });
  box.addEventListener("pointerleave", tip.hide);
  return el("div", {class: "card detail"},
    el("div", {class: "chips"}, chip("reward", number(s.reward)), chip("advantage", number(s.advantage)), ...Object.entries(s.rewards).map(([k, x]) => chip(k, number(x))), s.label === null ? null : chip("label", s.label), chip("ended", s.status || "–"), chip("length", `${s.length} tokens`), chip("sample", `${s.id ?? "–"} in group ${s.group ?? "–"}`)),
    el("h4", {}, "Prompt"), el("pre", {class: "prompt"}, s.prompt || "(empty)"), el("h4", {}, "Response"),
    s.tokens.length ? el("div", {class: "toolbar"}, el("label", {}, "colour by ", choice(Object.entries(COLOURINGS).map(([k, m]) => [k, m.label]), v.colour, x => { v.colour = x; }, "colour tokens by")),
      v.colour === "none" ? null : el("span", {class: "scale"}, mode.ends[0], el("i", {class: one ? "one" : ""}), mode.ends[1]),
      v.colour === "none" || one ? null : el("label", {}, "full colour at a ratio of ", choice([[2, "2"], [1.1, "1.1"], [1.01, "1.01"], [1.0001, "1.0001"]], v.full, x => { v.full = +x; }, "ratio of full colour"))) : el("p", {class: "foot"}, "This sample was written without tokens."),
    s.tokens.length ? box : el("pre", {class: "prompt"}, s.response || "(empty)"));
}

function others(runs) {
  const used = new Set(CHART_SECTIONS.flatMap(s => (typeof s.charts === "function" ? s.charts(runs) : s.charts).flatMap(c => c.metrics)));
  const rest = names(runs).filter(n => !used.has(n) && !/\/layer_\d+$/.test(n)), grid = el("div", {class: "grid"}), shut = el("details", {}, el("summary", {}, `${rest.length} more metrics`), grid);
  shut.addEventListener("toggle", () => {
    shut.open ? view.open.add("others") : view.open.delete("others");
    if (shut.open && !grid.childElementCount) for (const n of rest) { const box = card(n); grid.append(box); drawChart(box, runs, {metrics: [n], unit: "value"}); }
  });
  shut.open = view.open.has("others");
  return el("section", {id: "others"}, el("h2", {}, "Everything else"), el("p", {class: "about"}, "All other metrics of the runs, those of your own hooks too."), shut);
}

function draw() {
  const runs = shownRuns(), main = byId("main"), top = scrollY, jobs = [], live = runs.filter(r => r.steps);
  byId("title").textContent = data.runs.length === 1 ? data.runs[0].name : `${data.runs.length} runs`;
  document.title = data.runs.map(r => r.name).join(", ") + " · GRPO report";
  const parts = [overview()], sections = [["runs", data.runs.length > 1 ? "Runs" : "Run"]];
  const push = (id, title, made) => { sections.push([id, title]); jobs.push(...(made.jobs || [])); parts.push(made.jobs ? made.part : made); };
  if (data.runs.some(r => r.steps)) push("alerts", "Alerts", alerts());
  if (live.length) {
    for (const s of CHART_SECTIONS) push(s.id, s.title, chartSection(s, live));
  } else if (data.runs.some(r => r.steps)) parts.push(el("p", {class: "blank"}, "All runs are hidden: click a run's name above."));
  if (runs.some(r => r.steps || r.samples.length)) { push("lengths", "Lengths", lengths(runs)); push("samples", "Samples", samples(runs)); }
  if (live.length) push("others", "Everything else", others(live));
  main.replaceChildren(...parts);
  byId("nav").replaceChildren(...sections.map(([id, title]) => el("a", {href: "#" + id}, title)));
  jobs.forEach(job => job());
  scrollTo(0, top);
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
  byId("theme").textContent = `theme: ${name || "auto"}`;
  try { localStorage.setItem("grpo-theme", name); } catch { /* a file page may have no storage */ }
}

async function poll() {
  const live = byId("live");
  live.hidden = false;
  let tag = null;
  for (;;) {
    try {
      const answer = await fetch("/data", {cache: "no-store", headers: tag ? {"If-None-Match": tag} : {}, signal: AbortSignal.timeout(60000)});
      if (answer.status === 200) { tag = answer.headers.get("ETag"); const fresh = await answer.json(); if (JSON.stringify(fresh) !== JSON.stringify({...data, poll: undefined})) { data = {...fresh, poll: data.poll}; draw(); } }
      else if (answer.status !== 304) throw new Error(await answer.text());
      live.textContent = `● live, ${new Date().toLocaleTimeString()}`; live.className = "";
    } catch (error) { live.textContent = `● no answer from the report's server (${error.message})`; live.className = "lost"; }
    await new Promise(done => setTimeout(done, data.poll * 1000));
  }
}

let stored = "";
try { stored = localStorage.getItem("grpo-theme") || ""; } catch { /* as above */ }
setTheme(["light", "dark"].find(t => location.hash === "#" + t) || stored);
byId("theme").addEventListener("click", () => setTheme({"": "light", light: "dark", dark: ""}[document.documentElement.dataset.theme || ""]));
byId("axis").addEventListener("change", e => { view.axis = e.target.value; draw(); });
byId("smooth").addEventListener("input", e => { if (!view.frame) view.frame = requestAnimationFrame(() => { view.frame = 0; draw(); }); view.smooth = +e.target.value; });
let resized, width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clearTimeout(resized); resized = setTimeout(draw, 150); } });
draw();
if (data.poll) poll();
