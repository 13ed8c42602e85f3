// Charts as inline SVG: lines, stacked bars, histograms, a waterfall. Each takes a card's element and a description, and draws itself into it.
const SVG = "http://www.w3.org/2000/svg";
const colour = i => `var(--c${i % 8})`;
const layer = k => colour(k + 2);     // parts of a stack: the first runs keep their colours to themselves
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function number(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return v.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return v.toLocaleString("en", {maximumFractionDigits: digits}).replace("-", "−");
}

// Ticks at 1, 2, 2.5 or 5 times a power of ten.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find(m => m * power >= raw * 0.999) * power;
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(+(i * step).toPrecision(12));
  return out;
}

function logTicks(low, high) {
  const a = Math.floor(low + 1e-9), b = Math.ceil(high - 1e-9), every = Math.max(1, Math.ceil((b - a) / 6)), out = [];
  for (let e = a; e <= b; e += every) for (const m of b - a <= 2 ? [1, 2, 5] : [1]) {
    const at = e + Math.log10(m);
    if (at >= low - 1e-9 && at <= high + 1e-9) out.push(at);
  }
  return out;
}

function superscript(n) { return String(n).replace(/./g, c => "⁰¹²³⁴⁵⁶⁷⁸⁹"["0123456789".indexOf(c)] || "⁻"); }
function logLabel(at) {
  const e = Math.floor(at + 1e-9), m = Math.round(10 ** (at - e));
  if (e >= -3 && e <= 3) return String(+(m * 10 ** e).toPrecision(1));
  return (m === 1 ? "" : m + "·") + "10" + superscript(e);
}

function shortNumber(v, span) {
  if (v === 0) return "0";
  const size = Math.max(Math.abs(v), span);
  if (size < 1e-3 || size >= 1e7) return v.toExponential(Math.max(0, Math.min(3, Math.ceil(Math.log10(Math.abs(v) / span)) + 1))).replace(/\.?0+e/, "e").replace("e+", "e").replace(/-/g, "−");
  if (size >= 1e4) return (+(v / 1000).toPrecision(6)).toLocaleString("en") + "k";
  return (+v.toPrecision(6)).toLocaleString("en", {maximumFractionDigits: 6}).replace("-", "−");
}

const tip = {
  show(event, ...rows) {
    const box = document.getElementById("tip");
    box.replaceChildren(...rows);
    box.hidden = false;
    const {width, height} = box.getBoundingClientRect();
    let x = event.clientX + 16, y = event.clientY + 14;
    if (x + width > innerWidth - 8) x = event.clientX - width - 16;
    if (y + height > innerHeight - 8) y = event.clientY - height - 14;
    box.style.left = Math.max(4, x) + "px";
    box.style.top = Math.max(4, y) + "px";
  },
  hide() { document.getElementById("tip").hidden = true; },
  row(mark, name, value) { return el("div", {class: "row"}, mark, el("span", {class: "name"}, name), el("b", {}, value)); },
};
const swatch = paint => el("i", {class: "swatch", style: `background:${paint}`});
function lineKey(paint, dash) {
  return svg("svg", {width: 20, height: 8}, svg("line", {x1: 1, x2: 19, y1: 4, y2: 4, stroke: paint, "stroke-width": 2, "stroke-dasharray": dash}));
}

// The frame that all charts share: y grid and labels, x labels, both axis titles.
function frame(box, {height = 190, x, y, xLabel, yLabel, yTicks, yText, xTicks, xText}) {
  const width = Math.max(box.clientWidth, 240), labels = yTicks.map(yText);
  const left = 14 + Math.max(...labels.map(t => t.length), 2) * 6.4, right = 10, top = 20, bottom = 36;
  const root = svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${yLabel} by ${xLabel}`});
  const px = v => left + (v - x[0]) / (x[1] - x[0] || 1) * (width - left - right);
  const py = v => height - bottom - (v - y[0]) / (y[1] - y[0] || 1) * (height - top - bottom);
  yTicks.forEach((t, i) => root.append(
    svg("line", {class: "grid-line", x1: left, x2: width - right, y1: py(t), y2: py(t)}),
    svg("text", {x: left - 6, y: py(t) + 4, "text-anchor": "end"}, labels[i])));
  root.append(svg("line", {class: "axis-line", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
  xTicks.forEach((t, i) => root.append(svg("text", {x: px(t), y: height - bottom + 15, "text-anchor": px(t) > width - 24 ? "end" : "middle"}, xText(t, i))));
  root.append(svg("text", {x: 2, y: 11}, yLabel), svg("text", {x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle"}, xLabel));
  return {root, px, py, left, right: width - right, top, bottom: height - bottom, width, height};
}

function smooth(ys, weight) {
  let mean = 0, norm = 0;
  return ys.map(v => { mean = weight * mean + (1 - weight) * v; norm = weight * norm + (1 - weight); return mean / norm; });
}

// lines: [{name, paint, dash, xs, ys, steps, lost: [x]}]; options: {log, zero, one, yLabel, xLabel, smoothing, limits: [{at, level}], marks: [{x, paint}]}
function lineChart(box, lines, options) {
  const {log, xLabel, yLabel, smoothing = 0} = options;
  let hidden = 0;
  const drawn = lines.map(line => {
    const keep = line.ys.map((_, i) => i).filter(i => !log || line.ys[i] > 0);
    hidden += line.ys.length - keep.length;
    const raw = keep.map(i => log ? Math.log10(line.ys[i]) : line.ys[i]);
    return {...line, xs: keep.map(i => line.xs[i]), real: keep.map(i => line.ys[i]), steps: keep.map(i => line.steps[i]), raw,
            shown: smoothing > 0 && raw.length > 8 ? smooth(raw, smoothing) : raw};
  });
  const allX = drawn.flatMap(l => l.xs.concat(l.lost)), allY = drawn.flatMap(l => l.raw);
  if (!allY.length) {
    box.append(el("p", {class: "foot"}, log ? "Every value is 0: nothing to draw on a logarithmic axis." : "No finite value."));
    return;
  }
  const extent = values => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  let [x0, x1] = extent(allX), [y0, y1] = extent(allY);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (options.zero && !log) y0 = Math.min(y0, 0);
  if (options.one && !log) y1 = Math.max(y1, 1);
  if (y1 - y0 < 1e-9 * Math.max(Math.abs(y0), Math.abs(y1)) || y0 === y1) {
    const pad = log ? 0.5 : Math.abs(y0) * 0.1 || 1;
    y0 -= options.zero && y0 === 0 ? 0 : pad; y1 += options.one && y1 === 1 ? 0 : pad;
  } else if (log) { const pad = (y1 - y0) * 0.06; y0 -= pad; y1 += pad; }
  let yTicks = log ? logTicks(y0, y1) : ticks(y0, y1, 4);
  if (log && yTicks.length < 2) { y0 = Math.floor(y0); y1 = Math.ceil(y1); yTicks = logTicks(y0, y1); }
  if (!log) {
    const step = yTicks[1] - yTicks[0] || (y1 - y0);
    y0 = Math.min(y0, Math.floor(y0 / step + 1e-6) * step); y1 = Math.max(y1, Math.ceil(y1 / step - 1e-6) * step);
    yTicks = ticks(y0, y1, Math.round((y1 - y0) / step));
  }
  const whole = options.integers, xTicks = ticks(x0, x1, Math.max(3, Math.min(8, box.clientWidth / 75))).filter(t => !whole || Number.isInteger(t));
  const f = frame(box, {x: [x0, x1], y: [y0, y1], xLabel, yLabel, yTicks, yText: t => log ? logLabel(t) : shortNumber(t, y1 - y0), xTicks, xText: t => shortNumber(t, x1 - x0)});
  for (const mark of options.marks || []) if (mark.x >= x0 && mark.x <= x1)
    f.root.append(svg("line", {x1: f.px(mark.x), x2: f.px(mark.x), y1: f.top, y2: f.bottom, stroke: mark.paint, "stroke-dasharray": "1 4", opacity: 0.8}));
  let label = Infinity;
  for (const limit of options.limits || []) {
    const at = log ? Math.log10(limit.at) : limit.at;
    if (at <= y0 || at >= y1) continue;
    const beside = Math.abs(f.py(at) - label) < 13;
    label = f.py(at);
    f.root.append(
      svg("line", {x1: f.left, x2: f.right, y1: f.py(at), y2: f.py(at), stroke: `var(--${limit.level})`, "stroke-dasharray": "5 4", opacity: 0.75}),
      svg("text", {class: "limit", x: f.right - (beside ? 92 : 2), y: f.py(at) - 3, "text-anchor": "end"}, `alert ${limit.over ? "over" : "under"} ${shortNumber(limit.at, limit.at)}`));
  }
  const path = (xs, ys) => xs.map((x, i) => (i ? "L" : "M") + f.px(x).toFixed(1) + " " + f.py(ys[i]).toFixed(1)).join("");
  for (const line of drawn) {
    if (line.shown !== line.raw) f.root.append(svg("path", {d: path(line.xs, line.raw), fill: "none", stroke: line.paint, "stroke-width": 1, opacity: 0.25}));
    f.root.append(svg("path", {d: path(line.xs, line.shown), fill: "none", stroke: line.paint, "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round", "stroke-dasharray": line.dash}));
    if (line.xs.length <= 24) line.xs.forEach((x, i) => f.root.append(svg("circle", {cx: f.px(x), cy: f.py(line.shown[i]), r: 2.6, fill: line.paint})));
    for (const x of line.lost) f.root.append(svg("path", {d: `M${f.px(x)} ${f.bottom - 7}l4 7h-8z`, fill: "var(--bad)"}, svg("title", {}, "not finite")));
  }
  const cross = svg("line", {class: "cross", y1: f.top, y2: f.bottom, visibility: "hidden"}), dots = svg("g");
  f.root.append(cross, dots);
  f.root.addEventListener("pointermove", event => {
    const at = x0 + ((event.clientX - f.root.getBoundingClientRect().left) * f.width / f.root.getBoundingClientRect().width - f.left) / (f.right - f.left) * (x1 - x0);
    const hits = drawn.filter(l => l.xs.length).map(line => {
      let best = 0;
      line.xs.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(line.xs[best] - at)) best = i; });
      return {line, best};
    });
    const nearest = hits.reduce((a, b) => Math.abs(b.line.xs[b.best] - at) < Math.abs(a.line.xs[a.best] - at) ? b : a);
    const x = nearest.line.xs[nearest.best], close = hits.filter(h => Math.abs(h.line.xs[h.best] - x) <= (x1 - x0) / 60);
    cross.setAttribute("x1", f.px(x)); cross.setAttribute("x2", f.px(x)); cross.setAttribute("visibility", "visible");
    dots.replaceChildren(...close.map(h => svg("circle", {cx: f.px(h.line.xs[h.best]), cy: f.py(h.line.shown[h.best]), r: 4, fill: h.line.paint, stroke: "var(--card)", "stroke-width": 1.5})));
    tip.show(event, el("div", {}, options.xTitle ? options.xTitle(x) : `step ${nearest.line.steps[nearest.best]}`),
      ...close.map(h => tip.row(lineKey(h.line.paint, h.line.dash), h.line.name, number(h.line.real[h.best]))));
  });
  f.root.addEventListener("pointerleave", () => { tip.hide(); cross.setAttribute("visibility", "hidden"); dots.replaceChildren(); });
  box.append(f.root);
  if (hidden) box.append(el("p", {class: "foot"}, `${hidden} value${hidden > 1 ? "s" : ""} at or below 0 cannot be drawn on a logarithmic axis.`));
}

// data: {names, x, to, rows}: one bar per entry of x, stacked from the bottom in the order of names.
function stackedChart(box, data, {yLabel, xLabel, unit}) {
  const totals = data.rows.map(row => row.reduce((a, b) => a + b, 0)), high = Math.max(...totals) || 1, n = data.x.length;
  const yTicks = ticks(0, high, 4), every = Math.ceil(n / Math.max(3, Math.min(9, box.clientWidth / 70))), places = data.x.map((_, i) => i).filter(i => i % every === 0);
  const f = frame(box, {height: 210, x: [-0.5, n - 0.5], y: [0, Math.max(high, yTicks.at(-1))], xLabel, yLabel, yTicks, yText: t => shortNumber(t, high), xTicks: places, xText: i => data.x[i]});
  const wide = (f.right - f.left) / n, gap = wide > 6 ? 2 : wide > 3 ? 1 : 0;
  data.rows.forEach((row, i) => {
    const bar = svg("g"); let base = 0;
    row.forEach((value, k) => {
      if (value > 0) bar.append(svg("rect", {x: f.px(i) - wide / 2 + gap / 2, width: Math.max(wide - gap, 0.6), y: f.py(base + value), height: Math.max(f.py(base) - f.py(base + value) - (wide > 6 ? 1 : 0), 0.4), fill: layer(k)}));
      base += value;
    });
    const area = svg("rect", {x: f.px(i) - wide / 2, width: wide, y: f.top, height: f.bottom - f.top, fill: "transparent"});
    area.addEventListener("pointermove", event => {
      const steps = data.x[i] === data.to[i] ? `step ${data.x[i]}` : `mean over steps ${data.x[i]} to ${data.to[i]}`;
      tip.show(event, el("div", {}, steps), ...data.names.map((name, k) => tip.row(swatch(layer(k)), name, number(row[k]) + unit)).reverse(), tip.row("", "together", number(totals[i]) + unit));
    });
    area.addEventListener("pointerleave", tip.hide);
    bar.append(area); f.root.append(bar);
  });
  box.append(el("div", {class: "legend"}, ...data.names.map((name, k) => el("span", {class: "key"}, swatch(layer(k)), name))), f.root);
}

// parts: [[name, seconds]]: each starts where the one before ended.
function waterfall(box, parts, order) {
  const total = parts.reduce((a, [, s]) => a + s, 0) || 1, width = Math.max(box.clientWidth, 240), row = 24, left = 96, right = 110;
  const root = svg("svg", {class: "chart", viewBox: `0 0 ${width} ${parts.length * row + 30}`, height: parts.length * row + 30, role: "img", "aria-label": "seconds by phase"});
  const px = s => left + s / total * (width - left - right);
  for (const t of ticks(0, total, 4)) root.append(svg("line", {class: "grid-line", x1: px(t), x2: px(t), y1: 0, y2: parts.length * row}), svg("text", {x: px(t), y: parts.length * row + 14, "text-anchor": "middle"}, shortNumber(t, total)));
  let start = 0;
  parts.forEach(([name, s], i) => {
    root.append(svg("text", {x: left - 8, y: i * row + 16, "text-anchor": "end"}, name),
      svg("rect", {x: px(start), y: i * row + 4, width: Math.max(px(start + s) - px(start), 1.5), height: row - 8, rx: 3, fill: layer(order.indexOf(name))}),
      svg("text", {x: px(start + s) + 6, y: i * row + 16}, `${number(s)} s · ${Math.round(s / total * 100)} %`));
    start += s;
  });
  root.append(svg("text", {x: px(total / 2), y: parts.length * row + 28, "text-anchor": "middle"}, "seconds in a step"));
  box.append(root);
}

// groups: [{name, paint, values}]: shares per bin, bars of the runs side by side.
function histogram(box, groups, {xLabel, yLabel}) {
  const all = groups.flatMap(g => g.values), low = Math.min(...all), high = Math.max(...all);
  const step = Math.max(1, ticks(0, Math.max(high - low, 1), 24)[1]), first = Math.floor(low / step) * step, bins = Math.floor((high - first) / step) + 1;
  const shares = groups.map(g => { const counts = Array(bins).fill(0); g.values.forEach(v => counts[Math.floor((v - first) / step)]++); return counts.map(c => c / g.values.length * 100); });
  const top = Math.max(...shares.flat()), yTicks = ticks(0, top, 4), every = Math.ceil(bins / Math.max(3, Math.min(12, box.clientWidth / 60)));
  const label = i => step === 1 ? String(first + i) : `${first + i * step}`;
  const f = frame(box, {height: 220, x: [-0.5, bins - 0.5], y: [0, Math.max(top, yTicks.at(-1))], xLabel, yLabel, yTicks, yText: t => shortNumber(t, top), xTicks: Array.from({length: bins}, (_, i) => i).filter(i => i % every === 0), xText: label});
  const wide = (f.right - f.left) / bins, each = Math.min(wide * 0.86 / groups.length, 60);
  for (let i = 0; i < bins; i++) {
    shares.forEach((share, g) => { if (share[i]) f.root.append(svg("rect", {x: f.px(i) + (g - groups.length / 2) * each + 0.5, width: Math.max(each - 1, 0.7), y: f.py(share[i]), height: f.py(0) - f.py(share[i]), rx: Math.min(2, each / 3), fill: groups[g].paint})); });
    const area = svg("rect", {x: f.px(i) - wide / 2, width: wide, y: f.top, height: f.bottom - f.top, fill: "transparent"});
    area.addEventListener("pointermove", event => tip.show(event, el("div", {}, step === 1 ? `${first + i} tokens` : `${first + i * step} to ${first + (i + 1) * step - 1} tokens`), ...groups.map((g, k) => tip.row(swatch(g.paint), g.name, number(shares[k][i]) + " %"))));
    area.addEventListener("pointerleave", tip.hide);
    f.root.append(area);
  }
  box.append(f.root);
}
