"use strict";
// Draws the tape that stands in the page as JSON; what is in it says minigrad/study/page/__init__.py. Every text from the
// tape is put in place as text, never as markup. This file: mathematics, arrays and attention; then follow graph.js, the
// modules in layers, and page.js, the panel, the steps and the keys. The three are one script.

const tape = JSON.parse(document.getElementById("data").textContent);
const {nodes, leaves, pulls, steps, ops, snapshots, attentions, compositions, tokens} = tape;
const $ = id => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const FORWARD = 0, BACKWARD = 1;

/** An element: its attributes ("on..." are listeners; false leaves one out, but is a word in aria-...), then its inside. */
function make(space, tag, attributes = {}, ...inside) {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") ? value !== undefined : value || value === 0) made.setAttribute(name, value);
  }
  made.append(...inside.flat(9).filter(x => x !== null && x !== undefined && x !== false && x !== ""));
  return made;
}
const el = (...given) => make("", ...given);
const svg = (...given) => make("http://www.w3.org/2000/svg", ...given);

/** Four significant digits; a true minus sign. */
function number(x) {
  if (typeof x === "string") return x.replace("-", "−").replace("inf", "∞").replace("nan", "NaN");
  const size = Math.abs(x);
  const plain = size === 0 ? "0" : size >= 1e-3 && size < 1e6
    ? (size < 1e4 ? Number(size.toPrecision(4)) : Math.round(size)).toLocaleString("en", {maximumFractionDigits: 9})
    : size.toExponential(3).replace(/\.?0+(?=e)/, "").replace("e-", "e−").replace("e+", "e");
  return x < 0 ? "−" + plain : plain;
}
const bytes = n => n < 1e3 ? `${n} B` : n < 1e6 ? `${number(n / 1e3)} kB` : `${number(n / 1e6)} MB`;
const times = shape => shape.replace(/^\(|,?\)$/g, "").replaceAll(", ", " × ") || "scalar";
const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;
const unpacked = (text, Kind) => new Kind(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);

// ------------------------------------------------------------------------------------------------ mathematics

const GREEK = {Phi: "Φ", phi: "φ", pi: "π", sigma: "σ", inf: "∞"};
const SIGNS = {"->": "→", "<=": "≤", ">=": "≥", "!=": "≠", "-": "−"};
const TOKEN = /`[^`]*`|\(A\.10\.\d+(?: to A\.10\.\d+)?\)|[A-Za-z]+\d*|\d+(?:\.\d+)?(?:e-?\d+)?|->|<=|>=|!=|\s+|./g;

/** A line of a docstring's mathematics: x_i and x^(..) become sub- and superscripts, variables stand in italics. */
function maths(line, names = []) {
  const known = new Set(names);
  const write = found => {
    const out = document.createDocumentFragment();
    for (let i = 0; i < found.length; i++) {
      const t = found[i], before = found[i - 1] || "", after = found[i + 1] || "";
      if ((t === "^" || t === "_") && /\S/.test(before) && /\S/.test(after)) {
        const [inside, end] = operand(found, i + 1);
        out.append(el(t === "^" ? "sup" : "sub", {}, write(inside)));
        i = end - 1;
      } else if (t[0] === "`") out.append(el("code", {}, t.slice(1, -1)));
      else if (/^\(A\.10/.test(t)) out.append(el("span", {class: "tag"}, t));
      else if (t in GREEK) out.append(el("var", {}, GREEK[t]));
      else if (t === "sqrt" && (after === "(" || after === " ")) {
        out.append("√");
        i += after === " ";
      } else if (t === "sum" && after === " " && /^([A-Za-z]|ct|\()$/.test(found[i + 2] || "")) out.append("Σ");
      else if (t === "ct") out.append(el("var", {class: "ct"}, t));
      else if (known.has(t) || /^[A-Za-z]$/.test(t) && !(t === "a" && !known.has(t) && /^[a-z]{2,}$/.test(found[i + 2] || "")
               && found[i + 2] !== "the") && before !== "'") out.append(el("var", {}, t));
      else if (t === "-" && /[a-z]{2}$/.test(before) && /^[a-z]{2}/.test(after)) out.append("-");
      else if (t === "'") out.append(after === "s" ? "’" : "′");
      else out.append(SIGNS[t] || t);
    }
    return out;
  };
  return write(line.match(TOKEN) || []);
}

/** What a ^ or _ at `i - 1` applies to, and where that ends: -x, (a b), |x|, name, name(a, b). */
function operand(found, i) {
  let end = i + (found[i] === "-");
  const closing = start => {
    let depth = 0;
    for (let j = start; j < found.length; j++) {
      depth += found[j] === "(" ? 1 : found[j] === ")" ? -1 : 0;
      if (!depth) return j + 1;
    }
    return found.length;
  };
  if (found[end] === "(") {
    const whole = closing(end);
    return end === i ? [found.slice(i + 1, whole - 1), whole] : [found.slice(i, whole), whole];
  }
  if (found[end] === "|") end = found.indexOf("|", end + 1) + 1 || found.length;
  else if (/^[A-Za-z]{2}/.test(found[end] || "") && found[end + 1] === "(") end = closing(end + 1);
  else end += 1;
  return [found.slice(i, end), end];
}

const formula = (lines, names, small) =>
  el("div", {class: "formula" + (small ? " small" : "")}, lines.map(line => el("p", {}, maths(line, names))));

// -------------------------------------------------------------------------------------------- arrays as pictures

const themed = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));

/** The colour of a share in [-1, 1] between negative, zero and positive of the theme. */
function shades() {
  const [zero, below, above] = ["--zero", "--negative", "--positive"].map(name => rgb(themed(name)));
  return share => {
    const end = share < 0 ? below : above, much = Math.min(1, Math.abs(share));
    return zero.map((c, i) => Math.round(c + (end[i] - c) * much));
  };
}

function paint(canvas, columns, rows, colour) {
  canvas.width = columns;
  canvas.height = rows;
  const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  for (let i = 0; i < columns * rows; i++) image.data.set([...colour(i), 255], 4 * i);
  pen.putImageData(image, 0, 0);
}

const counted = s => [s.nans && `${s.nans} NaN`, s.infs && `${s.infs} infinite`].filter(Boolean).join(", ");
const spoken = s => `min ${number(s.min)}, mean ${number(s.mean)}, max ${number(s.max)}, norm ${number(s.norm)}`
  + (counted(s) ? `, ${counted(s)}` : "");
const written = s => `(${s.shape.join(", ")}${s.shape.length === 1 ? "," : ""})`;

/** A snapshot: its numbers or its picture, and what sums it up. */
function shown(index, perRow = innerWidth < 800 ? 4 : 8) {
  if (index === null) return el("p", {class: "note"}, "No values: this tape was opened with values=False.");
  const s = snapshots[index];
  const stats = el("dl", {class: "stats"}, ["min", "mean", "max", "norm"].map(name =>
    el("div", {}, el("dt", {}, name), el("dd", {"data-stat": name}, number(s[name])))),
    counted(s) && el("div", {class: "alarm"}, el("dt", {}, "not finite"), el("dd", {}, counted(s))));
  const single = s.values && s.values.length === 1;
  return el("figure", {class: "snap", "data-snapshot": index},
    el("figcaption", {}, el("span", {}, times(written(s))), el("span", {}, s.dtype)),
    s.values ? numbers(s, perRow) : heatmap(s), single ? null : stats);
}

function numbers(s, perRow) {
  if (!s.values.length) return el("p", {class: "note"}, "no elements");
  if (!s.shape.length) return el("div", {class: counted(s) ? "single alarm" : "single"}, number(s.values[0]));
  const columns = s.shape.length === 1 ? Math.min(perRow, s.shape[0]) : s.shape.at(-1), shade = shades();
  const top = Math.max(...s.values.map(v => typeof v === "number" ? Math.abs(v) : 0)) || 1;
  const cell = v => {
    const [r, g, b] = shade(typeof v === "number" ? 0.55 * v / top : 0);
    return el("td", {style: `background: rgb(${r}, ${g}, ${b})`, class: typeof v === "string" && "alarm"}, number(v));
  };
  const rows = [];
  for (let i = 0; i < s.values.length; i += columns) {
    let at = i / columns, name = s.shape.length === 1 ? `${i}:` : "";
    for (const n of s.shape.slice(1, -1).reverse().concat(s.shape.length > 1 ? Infinity : [])) {
      name = `${at % n}, ${name}`;
      at = Math.floor(at / n);
    }
    if (s.shape.length > 1) name += ":";
    rows.push(el("tr", {}, s.values.length > columns || s.shape.length > 1 ? el("th", {scope: "row"}, `[${name}]`) : null,
      s.values.slice(i, i + columns).map(cell)));
  }
  return el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "Values"},
    el("table", {class: "numbers"}, rows));
}

function heatmap(s) {
  const cells = unpacked(s.cells, Int8Array), shade = shades(), grey = rgb(themed("--hatch"));
  const width = Math.max(10 * s.columns, 160), height = s.rows === 1 ? 26 : 9 * s.rows;
  const full = [s.shape.slice(0, -1).reduce((a, b) => a * b, 1), s.shape.at(-1) ?? 1];
  const block = [full[0] / s.rows, full[1] / s.columns].map(n => Number(n.toFixed(1)));
  const signed = s.min < 0, top = s.top || 1;
  const at = el("span", {class: "at", "aria-hidden": "true"});
  const canvas = el("canvas", {role: "img", "aria-label": `Heat map of an array ${written(s)}: ${spoken(s)}`,
    style: `width: ${width}px; height: ${height}px`,
    onmousemove: event => {
      const box = canvas.getBoundingClientRect();
      const row = Math.min(s.rows - 1, Math.floor((event.clientY - box.top) / box.height * s.rows));
      const column = Math.min(s.columns - 1, Math.floor((event.clientX - box.left) / box.width * s.columns));
      const q = cells[Math.max(0, row) * s.columns + Math.max(0, column)];
      const from = [row, column].map((k, axis) => Math.floor(k * full[axis] / [s.rows, s.columns][axis]));
      const said = q === -128 ? "not finite" : (q / 127 * top).toPrecision(2).replaceAll("-", "−");
      at.textContent = `[${from.join(", ")}] ≈ ${said}`;
    }, onmouseleave: () => { at.textContent = ""; }});
  paint(canvas, s.columns, s.rows, i => cells[i] === -128 ? grey : shade(cells[i] / 127));
  const ends = signed ? "var(--negative), var(--zero), var(--positive)" : "var(--zero), var(--positive)";
  return el("div", {}, canvas, el("div", {class: "ramp"},
    el("span", {}, signed ? `−${number(s.top)}` : "0"), el("i", {style: `background: linear-gradient(90deg, ${ends})`}),
    el("span", {}, number(s.top)),
    block[0] * block[1] > 1 && el("span", {}, `a cell: mean of ${block[0]} × ${block[1]}`), at));
}

// -------------------------------------------------------------------------------------------------- attention

const picked = {head: 0, query: Infinity};               // the last query sees most

/** A of one head, a row per query; under it what the picked query looks at. */
function attention(index) {
  const a = attentions[index], size = a.rows * a.columns;
  const weights = unpacked(a.weights, Uint16Array), bits = unpacked(a.visible, Uint8Array);
  const seen = i => bits[i >> 3] >> (i & 7) & 1;
  const labels = n => i => tokens && tokens.length === n ? mark(tokens[i]) : String(i);
  const query = labels(a.queries), key = labels(a.keys);
  picked.head = Math.min(picked.head, a.heads - 1);
  picked.query = Math.min(picked.query, a.rows - 1);
  const shade = shades(), hidden = rgb(themed("--hidden"));
  const ink = weight => shade(Math.sqrt(weight / 1e4));    // small weights too can be told apart
  const colour = head => i => seen(head * size + i) ? ink(weights[head * size + i]) : hidden;
  const small = [...Array(a.heads).keys()].map(head => {
    const canvas = el("canvas", {"aria-hidden": "true"});
    paint(canvas, a.columns, a.rows, colour(head));
    return el("button", {type: "button", role: "radio", "aria-checked": head === picked.head, onclick: () => {
      picked.head = head;
      draw();
    }}, canvas, `head ${head}`);
  });
  const large = el("div", {}), said = el("p", {class: "said", "aria-live": "polite"});
  const CELL = 16, widest = (n, label) => Math.max(...[...Array(n).keys()].map(i => wide(label(i), "650 13px")));
  const left = 10 + widest(a.rows, query);
  const turned = [...Array(a.columns).keys()].some(j => key(j).length > 2);
  const above = turned ? 8 + widest(a.columns, key) : 20;

  function draw() {
    const base = picked.head * size, i = picked.query;
    small.forEach((button, head) => button.setAttribute("aria-checked", head === picked.head));
    const cells = [];
    for (let c = 0; c < size; c++) {
      const x = left + c % a.columns * CELL, y = above + Math.floor(c / a.columns) * CELL;
      cells.push(seen(base + c)
        ? svg("rect", {x, y, width: CELL - 1, height: CELL - 1, fill: `rgb(${ink(weights[base + c])})`})
        : svg("path", {d: `M${x + 3} ${y + CELL - 4}L${x + CELL - 4} ${y + 3}`, stroke: themed("--hatch")}));
    }
    const names = [...Array(a.rows).keys()].map(r => svg("text", {x: left - 6, y: above + r * CELL + 11.5,
      "text-anchor": "end", class: r === i && "picked"}, query(r)));
    const heads = [...Array(a.columns).keys()].map(j => turned
      ? svg("text", {transform: `translate(${left + j * CELL + 11.5} ${above - 5}) rotate(-90)`}, key(j))
      : svg("text", {x: left + j * CELL + 7.5, y: above - 6, "text-anchor": "middle"}, key(j)));
    const pick = event => {
      const box = event.currentTarget.getBoundingClientRect();
      picked.query = Math.max(0, Math.min(a.rows - 1, Math.floor((event.clientY - box.top) / box.height * a.rows)));
      draw();
    };
    const across = a.columns * CELL, down = a.rows * CELL;
    large.replaceChildren(svg("svg", {class: "weights", viewBox: `0 0 ${left + across + 2} ${above + down + 2}`,
      style: `max-width: ${Math.min(620, (left + across) * 1.25)}px`, role: "img", tabindex: 0,
      "aria-label": `Attention weights of head ${picked.head}, ${a.rows} queries by ${a.columns} keys; `
        + "up and down pick a query",
      onkeydown: event => {
        const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
        if (!by) return;
        event.preventDefault();
        event.stopPropagation();
        picked.query = Math.max(0, Math.min(a.rows - 1, picked.query + by));
        draw();
        large.firstChild.focus();
      }}, heads, names, cells,
      svg("rect", {class: "frame", x: left - 1.5, y: above + i * CELL - 1.5, width: across + 2, height: CELL + 2, rx: 2}),
      svg("rect", {class: "hit", x: left, y: above, width: across, height: down, onclick: pick})));
    const row = [...Array(a.columns).keys()].filter(j => seen(base + i * a.columns + j))
      .map(j => [weights[base + i * a.columns + j], j]).sort((p, q) => q[0] - p[0]);
    said.replaceChildren(`Query ${placed(query(i), i)} sees ${plural(row.length, "key")}`
      + (a.columns < a.keys ? ` of the first ${a.columns}` : "") + (row.length ? ": " : "."),
      row.slice(0, 4).map(([w, j]) => `${placed(key(j), j)} ${(w / 1e4).toFixed(4)}`).join(",  ")
      + (row.length > 4 ? ", …" : ""));
  }
  draw();
  const table = el("details", {ontoggle: event => {
    if (!event.target.open || table.children.length > 1) return;
    const keys = [...Array(a.columns).keys()];
    table.append(el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "Attention weights"},
      [...Array(a.heads).keys()].map(head => el("table", {class: "numbers"}, el("caption", {}, `head ${head}`),
        el("tr", {}, el("th", {}, "query"), keys.map(j => el("th", {scope: "col"}, key(j)))),
        [...Array(a.rows).keys()].map(r => el("tr", {}, el("th", {scope: "row"}, query(r)), keys.map(j => {
          const c = head * size + r * a.columns + j;
          return el("td", {}, seen(c) ? (weights[c] / 1e4).toFixed(4) : "hidden");
        })))))));
  }}, el("summary", {}, "All weights as numbers"));
  const cut = a.rows < a.queries || a.columns < a.keys;
  return el("div", {class: "attention", "data-attention": index},
    el("div", {class: "heads", role: "radiogroup", "aria-label": "Head"}, small), large,
    el("div", {class: "ramp"}, el("span", {}, "0"),
      el("i", {style: `background: linear-gradient(90deg, ${[0, 1, 4, 9, 16, 25].map(k =>
        `rgb(${ink(400 * k)}) ${4 * k}%`)})`}), el("span", {}, "1"),
      el("i", {class: "stroke"}),
      el("span", {}, "hidden from the query")), said,
    el("p", {class: "note"}, `A row per query, a column per key; the first element of the batch, before dropout`
      + (cut ? `; the first ${a.rows} of ${a.queries} queries and ${a.columns} of ${a.keys} keys.` : ".")), table);
}

/** A token that can be seen, and is not too long. */
function mark(token) {
  const said = token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f]/g, "·");
  const letters = [...said];
  return letters.length > 12 ? letters.slice(0, 11).join("") + "…" : said || "∅";
}
const placed = (label, i) => label === String(i) ? label : `${label} (${i})`;
