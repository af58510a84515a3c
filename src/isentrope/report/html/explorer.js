"use strict";
// Formulas: the same as in isentrope's classes, checked against the table of values that the page holds.
const TRAINED_REACH = 0.75;
const METHODS = {
  rope: (i, j) => i - j,
  pi: (i, j, p) => (i - j) / Math.max(1, p.n / p.trained),
  rerope: (i, j, p) => Math.min(i - j, p.window),
  leakyrerope: (i, j, p) => {
    const leak = Math.max(1, (p.n - 1 - p.window) / (farthest(p) - p.window));
    return i - j < p.window ? i - j : p.window + (i - j - p.window) / leak;
  },
  selfextend: (i, j, p) => {
    const group = Math.max(1, Math.ceil((p.n - 1 - p.window) / (farthest(p) - p.window)));
    if (i - j < p.window) return i - j;
    return Math.floor(i / group) + p.window - Math.floor(p.window / group) - Math.floor(j / group);
  },
  jetlong: (i, j, p) => {
    const group = Math.max(1, Math.floor((p.n - 1) / p.trained) + 1);
    return i - j < p.window ? i - j : Math.floor(i / group) - Math.floor(j / group);
  },
  dualchunk: (i, j, p) => {
    const chunk = Math.max(2, Math.floor(0.75 * p.trained));
    const local = Math.floor(chunk / 6);
    const size = chunk - local;
    const apart = Math.floor(i / size) - Math.floor(j / size);
    const at = apart === 0 ? i % size : Math.min(apart === 1 ? (i % size) + size : 2 * size - 1, chunk);
    return at - (j % size);
  },
  window: (i, j, p) => (i - j < p.window ? i - j : null),
};
const farthest = (p) => Math.floor(TRAINED_REACH * p.trained + 1e-9);
const LAWS = {
  none: () => 1,
  infoscale: (n, t, d) => Math.sqrt(Math.expm1((-2 * Math.log(n)) / d) / Math.expm1((-2 * Math.log(t)) / d)),
  infoscaleexact: (n, t, d) => LAWS.infoscale(n, t, d) * Math.exp((2 * Math.log(n / t)) / d),
  logn: (n, t) => Math.log(n) / Math.log(t),
  power: (n, t) => Math.pow(n / t, 0.63 / Math.log(t)),
  yarntemperature: (n, t) => Math.pow(0.1 * Math.log(n / t) + 1, 2),
};
const tau = (law, n, t, d) => (n <= t ? 1 : LAWS[law](n, t, d));
const shareBias = (m, reference, beta) => beta * Math.log(Math.max(m / reference, 1));
// E Z = m exp(τμ + τ²σ²/2), as far_share_gaussian and far_entropy_gaussian
function farShare(n, window, reference, beta, heat, sigma) {
  const m = n - window;
  const near = Math.log(window) + (sigma * sigma) / 2;
  const far = Math.log(m) + (heat * heat * sigma * sigma) / 2 - shareBias(m, reference, beta);
  return 1 / (1 + Math.exp(near - far));
}
const farEntropy = (n, window, heat, sigma) => Math.max(Math.log(n - window) - (heat * sigma) ** 2 / 2, 0);

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#332288", "#999933", "#882255"];

function checkFormulas() {
  const wrong = [];
  const close = (a, b) => a === b || Math.abs(a - b) <= 1e-6 * Math.max(1, Math.abs(b));
  for (const c of DATA.checks.distances) {
    const value = METHODS[c.method](c.i, c.j, c);
    if (!close(value, c.value)) wrong.push(`${c.method} ${c.i},${c.j} at ${c.n}: ${value}, expected ${c.value}`);
  }
  for (const c of DATA.checks.laws) {
    const value = tau(c.law, c.n, c.trained, c.d);
    if (!close(value, c.value)) wrong.push(`${c.law} at ${c.n}: ${value}, expected ${c.value}`);
  }
  for (const c of DATA.checks.far) {
    const share = farShare(c.n, c.window, c.reference, c.beta, c.tau, c.sigma);
    const entropy = farEntropy(c.n, c.window, c.tau, c.sigma);
    if (!close(share, c.share) || !close(entropy, c.entropy)) wrong.push(`far keys at ${c.n}: ${share}, ${entropy}`);
  }
  const count = Object.values(DATA.checks).reduce((sum, rows) => sum + rows.length, 0);
  document.documentElement.dataset.checked = String(count);
  document.documentElement.dataset.wrong = String(wrong.length);
  if (wrong.length) $("warning").textContent = `Formulas of this page disagree with the library: ${wrong[0]}`;
}

const fmt = (x) => (x >= 1e4 ? `${+(x / 1024).toPrecision(3)}k` : x >= 100 ? String(Math.round(x)) : String(+x.toPrecision(3)));

function chart(id, series, options) {
  const width = 460, height = 270, left = 46, right = 18, top = 8, bottom = 36;
  const xs = series.flatMap((s) => s.points.map((p) => p[0]));
  let ys = series.flatMap((s) => s.points.map((p) => p[1])).filter(Number.isFinite);
  if (options.logY) ys = ys.map((y) => Math.max(y, 1e-9));
  const fx = Math.log2, fy = options.logY ? Math.log10 : (y) => y;
  const [x0, x1] = [fx(Math.min(...xs)), fx(Math.max(...xs))];
  let [y0, y1] = options.range || [fy(Math.min(...ys)), fy(Math.max(...ys))];
  if (y1 - y0 < 1e-9) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const px = (x) => left + ((fx(x) - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (y) => height - bottom - ((fy(y) - y0) / (y1 - y0)) * (height - top - bottom);
  let out = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${options.label}">`;
  for (let k = 0; k <= 4; k++) {
    const value = y0 + ((y1 - y0) * k) / 4, y = height - bottom - ((height - top - bottom) * k) / 4;
    out += `<path class="grid" d="M${left} ${y}H${width - right}"/>`;
    out += `<text x="${left - 5}" y="${y + 4}" text-anchor="end">${fmt(options.logY ? 10 ** value : value)}</text>`;
  }
  const step = Math.max(1, Math.ceil((x1 - x0) / 6));
  for (let e = Math.ceil(x0); e <= x1 + 1e-9; e += step) {
    out += `<text x="${px(2 ** e)}" y="${height - 20}" text-anchor="middle">${fmt(2 ** e)}</text>`;
  }
  out += `<text x="${(left + width) / 2}" y="${height - 4}" text-anchor="middle">${options.x}</text>`;
  if (options.mark && fx(options.mark) >= x0 && fx(options.mark) <= x1) {
    out += `<path class="mark" d="M${px(options.mark)} ${top}V${height - bottom}"/>`;
  }
  series.forEach((s, k) => {
    const line = s.points.filter((p) => Number.isFinite(p[1])).map((p) => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`);
    const colour = s.colour || COLOURS[k % COLOURS.length];
    out += `<polyline points="${line.join(" ")}" stroke="${colour}" stroke-width="${s.strong === false ? 1.2 : 2.4}"/>`;
  });
  out += "</svg><ul class='legend'>";
  series.forEach((s, k) => {
    out += `<li><span style="background:${s.colour || COLOURS[k % COLOURS.length]}"></span>${s.name}</li>`;
  });
  $(id).innerHTML = `${out}</ul>`;
}

function mix(a, b, t) {
  return a.map((x, k) => Math.round(x + (b[k] - x) * Math.min(1, Math.max(0, t))));
}

function drawDistances(p) {
  const canvas = $("distances"), cells = 192;
  canvas.width = canvas.height = cells;
  const context = canvas.getContext("2d"), image = context.createImageData(cells, cells);
  let beyond = 0, seen = 0, largest = 0;
  for (let y = 0; y < cells; y++) {
    for (let x = 0; x <= y; x++) {
      const i = Math.round((y * (p.n - 1)) / (cells - 1)), j = Math.round((x * (p.n - 1)) / (cells - 1));
      const d = METHODS[p.method](i, j, p), at = 4 * (y * cells + x);
      if (d === null) continue;
      seen++;
      largest = Math.max(largest, d);
      const untrained = d >= p.trained;
      beyond += untrained;
      const colour = untrained
        ? mix([253, 224, 197], [209, 53, 27], (d - p.trained) / Math.max(1, p.n - p.trained))
        : mix([232, 241, 250], [11, 60, 111], d / p.trained);
      image.data.set([...colour, 255], at);
    }
  }
  context.putImageData(image, 0, 0);
  const part = ((100 * beyond) / seen).toFixed(beyond && beyond < seen ? 1 : 0);
  $("distance-text").textContent =
    `Largest distance ${fmt(largest)}, trained below ${fmt(p.trained)}: ${part} % of the pairs seen are at distances that no training had.`;
}

function lengths(from, to) {
  const out = [];
  for (let e = Math.log2(from); e < Math.log2(to) + 1e-9; e += 0.125) out.push(2 ** e);
  return out;
}

function update() {
  const trained = 2 ** +$("trained").value;
  const n = Math.round(trained * 2 ** +$("times").value);
  const window = Math.max(1, Math.round(trained * +$("window").value));
  const beta = +$("beta").value, sigma = +$("sigma").value, d = 2 ** +$("dim").value;
  const law = $("law").value, method = $("method").value;
  const p = { n, window, trained, method };
  const shown = { trained, times: n, window, beta, sigma, dim: d };
  for (const [id, value] of Object.entries(shown)) $(`${id}-value`).textContent = id === "beta" || id === "sigma" ? value : Math.round(value);
  drawDistances(p);
  const all = lengths(trained, Math.max(n, 2 * trained) * 4);
  chart("laws", Object.keys(LAWS).map((name, k) => ({
    name, strong: name === law, colour: COLOURS[k], points: all.map((m) => [m, tau(name, m, trained, d)]),
  })), { x: "keys n", mark: n, label: "temperature against the number of keys" });
  const reference = Math.max(1, trained - window);
  const share = (b, m) => farShare(m, window, reference, b, tau(law, m, trained, d), sigma);
  const past = all.filter((m) => m > window);
  const betas = [...new Set([0, 0.5, 1, beta])].sort((a, b) => a - b);
  chart("share", betas.map((b) => ({
    name: `β = ${b}`, strong: b === beta, points: past.map((m) => [m, share(b, m)]),
  })), { x: "keys n", mark: n, range: [0, 1], label: "share of far keys against the number of keys" });
  chart("entropy", [
    { name: law === "none" ? "no law chosen" : law, points: past.map((m) => [m, farEntropy(m, window, tau(law, m, trained, d), sigma)]) },
    { name: "without a law", strong: false, points: past.map((m) => [m, farEntropy(m, window, 1, sigma)]) },
  ], { x: "keys n", mark: n, label: "entropy within far keys against the number of keys" });
  $("numbers").textContent = n > window
    ? `At n = ${n}: τ = ${tau(law, n, trained, d).toFixed(3)}, far logits lowered by ${shareBias(n - window, reference, beta).toFixed(2)}, far keys take ${(100 * share(beta, n)).toFixed(0)} % of attention.`
    : `At n = ${n}: every key is inside the window.`;
  const parts = [method === "rope" ? "" : method === "window" ? `window:size=${window}` : method === "pi" ? `pi:factor=${fmt(Math.max(1, n / trained))}` : method === "dualchunk" ? "dualchunk" : ["leakyrerope", "selfextend"].includes(method) ? `${method}:window=${window},reach=0.75` : `${method}:window=${window}`];
  const hasFar = ["rerope", "leakyrerope", "selfextend", "jetlong", "dualchunk"].includes(method);
  if (law !== "none") parts.push(`${law}:train_length=${trained}${hasFar ? ",keys=far" : ""}`);
  if (beta > 0 && hasFar) parts.push(`share:beta=${beta}`);
  $("recipe").textContent = parts.filter(Boolean).join("+") || "plain";
}

function drawMeasured() {
  const study = DATA.measured[+$("study").value];
  if (!study) return;
  const wanted = new Set([...$("recipes").querySelectorAll("input:checked")].map((box) => box.value));
  const series = study.rows.filter((row) => wanted.has(row.recipe)).map((row) => ({
    name: row.recipe,
    colour: COLOURS[study.rows.indexOf(row) % COLOURS.length],
    points: row.perplexity.map((y, k) => [(Math.max(study.edges[k], 1) + study.edges[k + 1]) / 2, y]),
  }));
  if (series.length) chart("measured", series, { x: "position in the text (tokens)", logY: true, mark: study.train_length, label: "perplexity by position" });
  else $("measured").textContent = "Choose a recipe.";
}

function chooseStudy() {
  const study = DATA.measured[+$("study").value];
  if (!study) return;
  $("recipes").replaceChildren(...study.rows.map((row, k) => {
    const line = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", value: row.recipe, checked: k < 5 || row.recipe === "plain" });
    line.append(box, ` ${row.recipe}`);
    return line;
  }));
  drawMeasured();
}

checkFormulas();
for (const id of ["trained", "times", "window", "beta", "sigma", "dim"]) $(id).addEventListener("input", update);
for (const id of ["law", "method"]) $(id).addEventListener("change", update);
DATA.measured.forEach((study, k) => $("study").append(new Option(study.name, String(k))));
$("study").addEventListener("change", chooseStudy);
$("recipes").addEventListener("change", drawMeasured);
update();
chooseStudy();
