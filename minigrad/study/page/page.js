"use strict";
// Draws the tape that stands in the page as JSON; what is in it says minigrad/study/page/__init__.py. Every text from the
// tape is put in place as text, never as markup.

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
    ? Number(size.toPrecision(size >= 1e4 ? String(Math.trunc(size)).length : 4)).toLocaleString("en", {maximumFractionDigits: 10})
    : size.toExponential(3).replace(/\.?0+(?=e)/, "").replace("e-", "e−").replace("e+", "e");
  return x < 0 ? "−" + plain : plain;
}
const bytes = n => n < 1024 ? `${n} B` : n < 1024 ** 2 ? `${number(n / 1024)} kB` : `${number(n / 1024 ** 2)} MB`;
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
      at.textContent = `[${from.join(", ")}] ≈ ${q === -128 ? "not finite" : (q / 127 * top).toPrecision(2).replace("-", "−")}`;
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
    large.replaceChildren(svg("svg", {class: "weights", viewBox: `0 0 ${left + a.columns * CELL + 2} ${above + a.rows * CELL + 2}`,
      style: `max-width: ${Math.min(620, (left + a.columns * CELL) * 1.25)}px`, role: "img", tabindex: 0,
      "aria-label": `Attention weights of head ${picked.head}, ${a.rows} queries by ${a.columns} keys. Up and down pick a query.`,
      onkeydown: event => {
        const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
        if (!by) return;
        event.preventDefault();
        event.stopPropagation();
        picked.query = Math.max(0, Math.min(a.rows - 1, picked.query + by));
        draw();
        large.firstChild.focus();
      }}, heads, names, cells,
      svg("rect", {class: "frame", x: left - 1.5, y: above + i * CELL - 1.5, width: a.columns * CELL + 2, height: CELL + 2, rx: 2}),
      svg("rect", {class: "hit", x: left, y: above, width: a.columns * CELL, height: a.rows * CELL, onclick: pick})));
    const row = [...Array(a.columns).keys()].filter(j => seen(base + i * a.columns + j))
      .map(j => [weights[base + i * a.columns + j], j]).sort((p, q) => q[0] - p[0]);
    said.replaceChildren(`Query ${i}${labelled(query(i), i)} sees ${plural(row.length, "key")}`
      + (a.columns < a.keys ? ` of the first ${a.columns}` : "") + (row.length ? ": " : "."),
      row.slice(0, 4).map(([w, j]) => `${key(j)}${labelled("", j, key(j))} ${(w / 1e4).toFixed(4)}`).join(",  ")
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
      el("i", {style: "width: 18px; background: linear-gradient(135deg, transparent 46%, var(--faint) 46% 54%, transparent 54%)"}),
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
const labelled = (label, i, other) => (other ?? label) === String(i) ? "" : other === undefined ? ` ${label}` : ` (${i})`;

// --------------------------------------------------------------------------- the graph: modules, layers, drawing

/** The modules as boxes. A box holds consecutive nodes, so that a module called twice has two and no edge goes back. */
function grouped() {
  const root = {path: "", label: "", items: [], first: 0, last: nodes.length - 1, up: null};
  let open = [root];
  nodes.forEach((node, i) => {
    const paths = [];
    for (const name of node.module ? node.module.split(".") : [])    // blocks.0 is one step, not two
      if (/^\d+$/.test(name) && paths.length) paths.push(`${paths.pop()}.${name}`);
      else paths.push(paths.length ? `${paths.at(-1)}.${name}` : name);
    let depth = 0;
    while (depth < paths.length && open[depth + 1] && open[depth + 1].path === paths[depth]) depth++;
    open = open.slice(0, depth + 1);
    for (; depth < paths.length; depth++) {
      const up = open.at(-1), path = paths[depth];
      const label = up.path && path.startsWith(up.path + ".") ? path.slice(up.path.length + 1) : path;
      const box = {path, label, items: [], first: i, last: i, up, key: `m${i}.${path}`};
      up.items.push(box);
      open.push(box);
    }
    open.at(-1).items.push({node: i, first: i, last: i, up: open.at(-1), key: `n${i}`, label: ""});
    for (const box of open) box.last = i;
  });
  const flatten = box => {                               // a box around a single node is a name for the node
    box.items = box.items.map(item => {
      if (!item.items) return item;
      flatten(item);
      return item.items.length === 1 && item.items[0].items === undefined
        ? {...item.items[0], up: box, label: item.label === nodes[item.first].op ? "" : item.label} : item;
    });
  };
  flatten(root);
  return root;
}

const root = grouped();
const uses = nodes.map(() => []);                        // by whom a node's output is used
nodes.forEach((node, i) => node.inputs.forEach(([, kind, from]) => kind === "node" && uses[from].push(i)));
const chosen = new Map();                                // boxes that the reader opened or closed: true or false
let following = true;
const holds = (item, i) => item.first <= i && i <= item.last;
const isOpen = box => box === root || (chosen.get(box.key) ?? (following && holds(box, focusNode())));

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map();
function wide(text, font) {
  if (!widths.has(font + text)) {
    ruler.font = `${font} ${themed("--ui")}`;
    widths.set(font + text, ruler.measureText(text).width);
  }
  return widths.get(font + text);
}
const LINE = 19, PAD = 13, GAP = 24, BESIDE = 16, LANE = 13, HEAD = 30;
const leavesOf = i => [...new Set(nodes[i].inputs.filter(([, kind]) => kind === "leaf").map(([, , leaf]) => leaf))];
const lastName = name => name.split(".").at(-1);

/** Sizes of an item and, within an open box, places: layer by layer, edges that skip layers in lanes on the left. */
function place(item) {
  if (!item.items) {
    const node = nodes[item.node], tags = leavesOf(item.node);
    item.tags = tags.length > 2 ? [...tags.slice(0, 1), -1] : tags;
    item.texts = [item.label ? `${item.label}  ${node.op}` : node.op, times(node.shape)];
    item.core = Math.max(64, 22 + Math.max(wide(item.texts[0], "600 13px"), wide(item.texts[1], "11.5px")));
    item.beside = Math.max(0, ...item.tags.map(leaf => 24 + wide(tagName(item, leaf), "11.5px")));
    item.w = item.core + item.beside;
    item.h = 2 * LINE + 8;
    item.port = item.core / 2;
    return;
  }
  if (!isOpen(item)) {
    item.texts = [`▸ ${item.label}`, `${plural(item.last - item.first + 1, "node")}, ${times(nodes[item.last].shape)}`];
    item.w = item.core = 28 + Math.max(wide(item.texts[0], "600 13px"), wide(item.texts[1], "11.5px"));
    item.h = 2 * LINE + 10;
    item.port = item.w / 2;
    return;
  }
  const owner = new Map();
  item.items.forEach(inner => {
    place(inner);
    for (let i = inner.first; i <= inner.last; i++) owner.set(i, inner);
  });
  const edges = new Map(), entry = {layer: 0}, exit = {};
  const link = (from, to, pair) => {
    const key = `${from.key ?? "in"}>${to.key ?? "out"}`;
    if (!edges.has(key)) edges.set(key, {from, to, pairs: []});
    edges.get(key).pairs.push(pair);
  };
  for (let i = item.first; i <= item.last; i++) {
    for (const [, kind, from] of nodes[i].inputs)
      if (kind === "node" && owner.get(from) !== owner.get(i)) link(owner.get(from) ?? entry, owner.get(i), [from, i]);
    for (const user of uses[i]) if (user > item.last) link(owner.get(i), exit, [i, user]);
  }
  const list = [...edges.values()], into = new Map(item.items.map(inner => [inner, []]));
  list.forEach(edge => edge.to !== exit && into.get(edge.to).push(edge));
  item.items.forEach(inner => { inner.layer = 1 + Math.max(0, ...into.get(inner).map(edge => edge.from.layer)); });
  const least = new Map();                               // what nothing leads to stands right above its first use
  list.forEach(({from, to}) => to !== exit && least.set(from, Math.min(least.get(from) ?? Infinity, to.layer)));
  item.items.forEach(inner => { if (!into.get(inner).length && least.has(inner)) inner.layer = least.get(inner) - 1; });
  exit.layer = 1 + Math.max(...item.items.map(inner => inner.layer));

  const layers = [];
  item.items.forEach(inner => (layers[inner.layer] ??= []).push(inner));
  let left = 0, right = 0, y = item === root ? 6 : HEAD + 14;
  const centre = thing => thing === entry ? 0 : thing.x + thing.port;
  layers.forEach(layer => {
    const wish = inner => {
      const near = into.get(inner).map(edge => centre(edge.from));
      return near.length ? near.reduce((a, b) => a + b) / near.length : 0;
    };
    const wishes = new Map(layer.map(inner => [inner, wish(inner)]));
    const row = [...layer].sort((a, b) => wishes.get(a) - wishes.get(b) || a.first - b.first);
    let end = -Infinity, off = 0;
    row.forEach(inner => {
      inner.x = Math.max(wishes.get(inner) - inner.port, end + BESIDE);
      end = inner.x + inner.w;
      off += inner.x + inner.port - wishes.get(inner);
    });
    row.forEach(inner => {
      inner.x -= off / row.length;
      inner.y = y;
      left = Math.min(left, inner.x);
      right = Math.max(right, inner.x + inner.w);
    });
    y += Math.max(...row.map(inner => inner.h)) + GAP;
  });
  const bottom = layer => Math.max(...layers[layer].map(inner => inner.y + inner.h));
  const lanes = {"-1": [], 1: []}, taken = new Map();    // a lane per source, as long as its longest edge, on its side
  const long = list.filter(({from, to}) => to.layer - from.layer > 1).sort((a, b) => a.from.layer - b.from.layer);
  long.forEach(({from, to}) => {
    const span = taken.get(from) ?? {start: from.layer, end: 0};
    span.end = Math.max(span.end, to.layer);
    taken.set(from, span);
  });
  for (const [from, span] of taken) {
    span.side = centre(from) > (left + right) / 2 + 20 ? 1 : -1;
    const ends = lanes[span.side], free = ends.findIndex(end => end <= span.start);
    span.lane = free < 0 ? ends.length : free;
    ends[span.lane] = span.end;
  }
  const margin = item === root ? 4 : PAD, shift = margin + lanes[-1].length * LANE - left;
  item.items.forEach(inner => { inner.x += shift; });
  item.w = Math.max(shift + right + lanes[1].length * LANE + margin, item === root ? 0 : 44 + wide(item.label, "600 13px"));
  item.h = y - GAP + (item === root ? 6 : PAD + 4);
  item.core = item.w;
  item.port = shift;
  item.lines = list.map(({from, to, pairs}) => {
    const x1 = from === entry ? shift : from.x + from.port, y1 = from === entry ? 0 : from.y + from.h;
    const x2 = to === exit ? shift : to.x + to.port, y2 = to === exit ? item.h : to.y;
    if (to.layer - from.layer === 1 && from !== entry || to.layer === 1)
      return {pairs, d: `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`};
    const {side, lane: k} = taken.get(from), lane = shift + (side < 0 ? left : right) + side * (9 + k * LANE);
    const start = from === entry ? HEAD - 8 : bottom(from.layer) + 4, end = y2 - GAP / 2 - 2;
    return {pairs, d: `M${x1} ${y1}C${x1} ${start + 14} ${lane} ${start} ${lane} ${start + 22}V${Math.max(start + 22, end - 12)}`
      + `C${lane} ${end + 8} ${x2} ${end - 6} ${x2} ${y2}`};
  });
}
const tagName = (item, leaf) => leaf < 0 ? `${leavesOf(item.node).length - 1} more` : lastName(leaves[leaf].name);

let drawn = [];                                          // what is on the sheet: {item, group} and {pairs, line}
let openNow = null;                                      // the keys of the boxes that are drawn open
function drawGraph() {
  const open = [];
  (function each(box) {
    for (const item of box.items) if (item.items && isOpen(item)) {
      open.push(item.key);
      each(item);
    }
  })(root);
  if (openNow === open.join(" ")) return;
  openNow = open.join(" ");
  const focused = document.activeElement?.getAttribute?.("data-key");
  place(root);
  drawn = [];
  const wires = svg("g", {"aria-hidden": "true", transform: "translate(0 0)"});
  const things = svg("g", {role: "none"});
  const draw = (item, x, y, level) => {
    const at = {"data-key": item.key, role: "treeitem", "aria-level": level, tabindex: -1, transform: `translate(${x} ${y})`};
    if (!item.items) {
      const node = nodes[item.node];
      const group = svg("g", {...at, "aria-label": `${item.node} ${item.label} ${node.op}, ${times(node.shape)}`,
        onclick: () => show(stepOf(item.node))},
        svg("rect", {width: item.core, height: item.h}),
        item.label
          ? svg("text", {x: item.port, y: 19, "text-anchor": "middle"},
              svg("tspan", {class: "title"}, item.label), svg("tspan", {dx: 6}, node.op))
          : svg("text", {x: item.port, y: 19, "text-anchor": "middle", class: "title"}, node.op),
        svg("text", {x: item.port, y: 36, "text-anchor": "middle", class: "shape"}, item.texts[1]));
      things.append(group);
      drawn.push({item, group});
      item.tags.forEach((leaf, k) => {
        const to = leaf < 0 ? null : leaf, middle = item.tags.length === 1 ? item.h / 2 : 14 + k * LINE;
        const tag = svg("g", {...at, "data-key": `l${item.node}.${leaf}`, class: "leaf", "data-leaf": to, "aria-level": level + 1,
          transform: `translate(${x + item.core} ${y + middle - 9})`,
          "aria-label": to === null ? `${tagName(item, leaf)} leaves` : `leaf ${leaves[leaf].name}`,
          onclick: () => to === null ? show(stepOf(item.node)) : showLeaf(to)},
          svg("rect", {width: item.beside, height: 18}),
          svg("path", {d: "M5 9l4 -4l4 4l-4 4z"}), svg("text", {x: 17, y: 13}, tagName(item, leaf)));
        things.append(tag);
      });
      return;
    }
    if (item !== root) {
      const open = isOpen(item), toggle = () => setOpen(item, !isOpen(item));
      const group = svg("g", {...at, class: open ? "box" : "box closed", "aria-expanded": open,
        "aria-label": `module ${item.path}, ${plural(item.last - item.first + 1, "node")}`});
      if (open)
        group.append(svg("rect", {class: "back", width: item.w, height: item.h, rx: 10}), svg("rect", {width: item.w, height: item.h}),
          svg("g", {class: "head", onclick: toggle}, svg("rect", {width: item.w, height: HEAD - 4, fill: "transparent"}),
            svg("text", {x: 12, y: 19, class: "title"}, `▾ ${item.label}`)));
      else {
        group.addEventListener("click", toggle);
        group.style.cursor = "pointer";
        group.append(svg("rect", {class: "stack", x: 4, y: 4, width: item.w, height: item.h}), svg("rect", {width: item.w, height: item.h}),
          svg("text", {x: item.port, y: 20, "text-anchor": "middle", class: "title"}, item.texts[0]),
          svg("text", {x: item.port, y: 38, "text-anchor": "middle", class: "shape"}, item.texts[1]));
      }
      things.append(group);
      drawn.push({item, group});
      if (!open) return;
    }
    for (const {d, pairs} of item.lines) {
      const line = svg("path", {d, class: "edge", transform: `translate(${x} ${y})`});
      wires.append(line);
      drawn.push({pairs, line});
    }
    item.items.forEach(inner => draw(inner, x + inner.x, y + inner.y, item === root ? 1 : level + 1));
  };
  draw(root, 0, 0, 0);
  const image = svg("svg", {width: Math.ceil(root.w + 8), height: Math.ceil(root.h), role: "tree",
    "aria-label": "Nodes of the tape by module", onkeydown: graphKeys}, things);
  image.insertBefore(wires, things);
  $("sheet").replaceChildren(image);
  if (focused) image.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
}

function setOpen(box, open) {
  chosen.set(box.key, open);
  drawGraph();
  markGraph();
}

/** Colours for what is done at this step, for the node of the step and for the edges of it. */
function markGraph(scroll = false) {
  const [kind, index] = steps[now.step], node = kind === FORWARD ? index : pulls[index].node;
  const made = new Set(), passed = new Set();
  for (let i = 0; i <= now.step; i++)
    if (steps[i][0] === FORWARD) made.add(steps[i][1]);
    else passed.add(pulls[steps[i][1]].node);
  const side = kind === FORWARD ? "is-forward" : "is-backward";
  let current = null;
  const dress = (thing, on, looks) => {                  // writing costs more than comparing
    if (thing.looks === looks) return;
    thing.looks = looks;
    on.setAttribute("class", looks);
  };
  for (const thing of drawn) {
    const {item, group, pairs, line} = thing;
    if (line) {
      dress(thing, line, pairs.some(([, to]) => to === node) ? `edge now ${side}` : "edge");
      continue;
    }
    const base = item.items ? isOpen(item) ? "box" : "box closed" : "node", shut = base !== "box";
    const here = node !== null && holds(item, node) && shut;
    let state = "";
    if (shut) state = passed.has(item.first) ? "pulled" : made.has(item.last) ? "done" : "later";
    dress(thing, group, `${base} ${state} ${here ? "now " + side : ""}`);
    if (here) current = group;
  }
  for (const old of $("sheet").querySelectorAll("[aria-current], [tabindex='0']")) {
    old.removeAttribute("aria-current");
    old.setAttribute("tabindex", -1);
  }
  if (current) {
    current.setAttribute("aria-current", "step");
    current.setAttribute("tabindex", 0);
  }
  if (!current) $("sheet").querySelector("[role=treeitem]")?.setAttribute("tabindex", 0);
  for (const leaf of $("sheet").querySelectorAll(".leaf"))
    leaf.classList.toggle("chosen", now.leaf !== null && leaf.getAttribute("data-leaf") === String(now.leaf));
  if (scroll && current) {
    const sheet = $("sheet").getBoundingClientRect(), box = current.getBoundingClientRect();
    const top = box.top - sheet.top - sheet.height / 2 + box.height / 2, far = Math.abs(top) > sheet.height;
    $("sheet").scrollBy({top, left: box.left - sheet.left - sheet.width / 2 + box.width / 2,
      behavior: far || calm.matches || now.playing ? "auto" : "smooth"});
  }
}

function graphKeys(event) {
  const all = [...$("sheet").querySelectorAll("[role=treeitem]")], at = all.indexOf(document.activeElement);
  const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
  if (at < 0) return;
  if (by) {
    const next = all[at + by];
    if (next) next.focus();
  } else if (event.key === "Enter") {
    const thing = drawn.find(({group}) => group === all[at]);
    if (thing && thing.item.items) setOpen(thing.item, !isOpen(thing.item));
    else all[at].dispatchEvent(new MouseEvent("click"));
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

// -------------------------------------------------------------------------------------------------- the panel

const now = {step: 0, leaf: null, playing: 0};
const focusNode = () => {
  const [kind, index] = steps[now.step];
  return (kind === FORWARD ? index : pulls[index].node) ?? -1;
};
const stepsOfNode = nodes.map(() => []), pullSteps = nodes.map(() => []);
steps.forEach(([kind, index], at) => {
  const node = kind === FORWARD ? index : pulls[index].node;
  if (node !== null) (kind === FORWARD ? stepsOfNode : pullSteps)[node].push(at);
});
/** The step of a node in the pass that is shown, or in the other one. */
function stepOf(node, other = false) {
  const back = (steps[now.step][0] === BACKWARD) !== other, last = pullSteps[node];
  return back && last.length ? last.find(at => at >= now.step) ?? last.at(-1) : stepsOfNode[node][0];
}
const runs = new Set(pulls.map(p => p.run)).size;

const namesOf = node => [...node.inputs.map(([name]) => name), ...Object.keys(node.params)];
const link = (text, go, label) => el("button", {type: "button", class: "link", onclick: go, "aria-label": label}, text);
const named = i => `${i} ${nodes[i].op}`;
/** Where an argument comes from or a cotangent goes. */
function reference([kind, which]) {
  if (kind === "node") return link(named(which), () => show(stepOf(which)));
  if (kind === "leaf") return link(leaves[which].name, () => showLeaf(which));
  return el("span", {class: "note"}, kind === "outside" ? `${which}, outside this tape` : constant(which));
}
const constant = said => said !== "" && Number.isFinite(Number(said)) ? number(Number(said)) : said;
const valueOf = ([kind, which]) => kind === "node" ? nodes[which].value : kind === "leaf" ? leaves[which].value : null;

function heading(node, i, kind, which) {
  const twin = node && (kind === FORWARD ? pullSteps[i].length : true);
  return [
    el("p", {class: "place"}, el("span", {class: "pass"}, which),
      el("span", {}, `step ${now.step + 1} of ${steps.length}`),
      twin && link(kind === FORWARD ? "its rule in the backward pass" : "its forward step", () => show(stepOf(i, true)))),
    el("h2", {}, el("span", {class: "number"}, i ?? ""), " ", node ? node.op : pulls[steps[now.step][1]].op),
    node && el("p", {class: "from"}, node.module && [node.module, " · "], el("code", {"data-line": ""}, node.line),
      node.equation && [" · ", node.equation], " · ", node.on,
      node.code && [el("br"), el("code", {class: "source"}, node.code)])];
}

function memory(held, kept, text) {
  const most = Math.max(1, ...steps.map(step => step[2]));
  return [el("h3", {}, "Memory"), el("p", {style: "margin: 0"}, text),
    el("div", {class: "bar", "aria-hidden": "true"}, el("i", {style: `width: ${100 * held / most}%`}))];
}

function params(node) {
  const given = Object.entries(node.params);
  return given.length ? el("dl", {class: "params"}, given.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)))) : null;
}

function forwardPanel(i) {
  const node = nodes[i], names = namesOf(node), held = steps[now.step][2];
  const given = node.inputs.filter(([, kind, which]) => kind !== "constant" || which !== null);
  return [
    ...heading(node, i, FORWARD, "forward"),
    formula([ops[node.op].formula], names), params(node),
    given.length ? [el("h3", {}, "Arguments"), el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "Arguments"},
      el("table", {class: "inputs"},
        el("tr", {}, ["", "from", "shape", "norm"].map(name => el("th", {scope: "col"}, name))),
        given.map(([name, ...from]) => {
          const s = valueOf(from), known = s === null || s === undefined ? null : snapshots[s];
          const shape = from[0] === "node" ? nodes[from[1]].shape : from[0] === "leaf" ? leaves[from[1]].shape : null;
          return el("tr", {}, el("td", {class: "math"}, el("var", {}, name)), el("td", {}, reference(from)),
            el("td", {}, shape ? times(shape) : ""), el("td", {}, known ? number(known.norm) : ""));
        })))] : null,
    node.attention === null ? null : [el("h3", {}, "Attention weights ", el("span", {class: "math"}, el("var", {}, "A"))),
      attention(node.attention)],
    el("h3", {}, "Value"), shown(node.value),
    composition(node.composition, node.op),
    el("h3", {}, "Rule"), formula(ops[node.op].rule, names, true),
    memory(held, node.kept, `${node.kept ? `It keeps ${bytes(node.kept)} for its rule` : "It keeps nothing"}; held so far: ${bytes(held)}.`),
    uses[i].length ? [el("h3", {}, "Used by"), el("p", {style: "margin: 0"}, [...new Set(uses[i])].map((user, k) =>
      [k ? ", " : "", link(named(user), () => show(stepOf(user)))]))] : null];
}

function backwardPanel(at) {
  const pull = pulls[at], node = pull.node === null ? null : nodes[pull.node], held = steps[now.step][2];
  const which = "backward" + (runs > 1 ? ` ${pull.run}` : "") + (pull.depth ? ", within a checkpoint" : "");
  const names = node ? namesOf(node) : [];
  return [
    ...heading(node, pull.node, BACKWARD, which),
    node && formula(ops[node.op].rule, names), node && params(node),
    el("h3", {}, "Cotangent in"), el("div", {class: "cotangent"}, shown(pull.ct)),
    el("h3", {}, pull.results.length > 1 ? "Cotangents out" : "Cotangent out"),
    el("div", {class: "results"}, pull.results.map(result => el("div", {class: "result"},
      el("p", {class: "to"}, result.argument && el("span", {class: "math"}, maths(`ct_${result.argument}`, names)),
        el("span", {}, "to ", reference(result.to))),
      result.rule && el("p", {class: "math", style: "margin: 0"}, maths(result.rule, names)),
      result.axes.length ? el("p", {class: "note", style: "margin: 4px 0 0"},
        `Summed over ${result.axes.length > 1 ? "axes" : "axis"} ${result.axes.join(", ")}, along which the forward pass had broadcast.`) : null,
      result.added ? el("p", {class: "note", style: "margin: 4px 0 0"}, "Added to what had come there before.") : null,
      shown(result.ct, pull.results.length > 1 ? 4 : undefined)))),
    pull.results.length ? null : el("p", {class: "note"}, "None: no argument asked for one."),
    memory(held, 0, `Held after this step: ${bytes(held)}${node && node.kept ? `; it had kept ${bytes(node.kept)}` : ""}.`),
    node && el("details", {}, el("summary", {}, "What it computed"), formula([ops[node.op].formula], names, true),
      el("div", {style: "margin-top: 14px"}, shown(node.value)),
      node.attention === null ? null : [el("h3", {}, "Attention weights"), attention(node.attention)])];
}

function leafPanel(i) {
  const leaf = leaves[i], users = nodes.map((_, k) => k).filter(k => leavesOf(k).includes(i));
  return [
    el("p", {class: "place"}, el("span", {class: "pass"}, "leaf"), link("back to the step", () => show(now.step))),
    el("h2", {}, leaf.name), el("p", {class: "from"}, `${times(leaf.shape)} · ${leaf.dtype}`),
    el("h3", {}, "Value"), shown(leaf.value),
    el("h3", {}, "Gradient"), leaf.gradient === null && tape.values
      ? el("p", {class: "note"}, "No backward pass on this tape reached it.") : shown(leaf.gradient),
    el("h3", {}, "Used by"), el("p", {style: "margin: 0"}, users.map((user, k) =>
      [k ? ", " : "", link(named(user), () => show(stepOf(user)))]))];
}

/** The reference of a fused op, opened on demand; a fused op in it opens in its turn. */
function composition(index, op) {
  if (index === null) return null;
  const {nodes: inner, whole} = compositions[index];
  const details = el("details", {class: "composition", ontoggle: event => {
    if (event.target !== details || !details.open || details.children.length > 1) return;
    details.append(el("ol", {class: "listing"}, inner.map((node, i) => el("li", {},
      el("div", {class: "row"}, el("span", {class: "index"}, i), el("span", {}, node.op),
        el("span", {class: "math"}, maths(node.formula, node.names)), el("span", {class: "shape"}, node.shape && times(node.shape)),
        el("span", {class: "used"}, "of ", node.from.map(constant).join(", "), node.equation && ` · ${node.equation}`,
          Object.entries(node.params).map(([name, value]) => ` · ${name} ${value}`))),
      composition(node.composition, node.op)))),
      whole ? "" : el("p", {class: "note"}, "Listed for smaller arrays, on which it was run again."));
  }}, el("summary", {}, `${op} is fused: open its reference, ${plural(inner.length, "plain node")}`));
  return details;
}

// --------------------------------------------------------------------------------------------- steps and time

function show(step, {quiet = false} = {}) {
  now.step = Math.max(0, Math.min(steps.length - 1, step));
  now.leaf = null;
  const [kind, index, held] = steps[now.step];
  document.body.className = kind === FORWARD ? "is-forward" : "is-backward";
  render(kind === FORWARD ? forwardPanel(index) : backwardPanel(index));
  drawGraph();
  markGraph(true);
  $("slider").value = now.step;
  const node = focusNode() < 0 ? null : nodes[focusNode()];
  const s = snapshots[kind === FORWARD ? index !== null && nodes[index].value : pulls[index].ct];
  const words = `Step ${now.step + 1} of ${steps.length}, ${kind === FORWARD ? "forward" : "backward"}: `
    + (node ? `${named(focusNode())}${node.module ? " in " + node.module : ""}, ${times(node.shape)}` : pulls[index].op)
    + (s ? `, ${kind === FORWARD ? "" : "cotangent "}norm ${number(s.norm)}` : "");
  $("slider").setAttribute("aria-valuetext", words);
  if (!quiet) $("live").textContent = words;
  $("legend").querySelector(".held").textContent = `${bytes(held)} held`;
  try { history.replaceState(null, "", `#${now.step + 1}`); } catch { /* a page in a frame may not */ }
}

function showLeaf(i) {
  now.leaf = i;
  pause();
  render(leafPanel(i));
  markGraph();
  $("live").textContent = `Leaf ${leaves[i].name}, ${times(leaves[i].shape)}`;
}

function render(parts) {
  const open = $("panel").querySelector("details.composition")?.open;
  $("panel").replaceChildren(...parts.flat(9).filter(Boolean));
  $("panel").scrollTop = 0;
  if (open) $("panel").querySelector("details.composition")?.setAttribute("open", "");
}

function pause() {
  clearInterval(now.playing);
  now.playing = 0;
  $("play").textContent = "▶";
  $("play").setAttribute("aria-label", "Play");
}
function play() {
  if (now.playing) return pause();
  if (now.step === steps.length - 1) show(0);
  $("play").textContent = "❚❚";
  $("play").setAttribute("aria-label", "Pause");
  now.playing = setInterval(() => {
    show(now.step + 1, {quiet: true});
    if (now.step === steps.length - 1) pause();
  }, 700);
}

/** The memory held as an area over the steps; the ground tells forward from backward. */
function drawTime() {
  const n = steps.length, most = Math.max(1, ...steps.map(step => step[2])), parts = [];
  for (let from = 0; from < n;) {
    let to = from;
    while (to < n && steps[to][0] === steps[from][0]) to++;
    const letter = steps[from][0] === FORWARD ? "f" : "b";
    const heights = steps.slice(from, to).map(([, , held], k) => {
      const y = 38 - 34 * held / most;
      return `L${from + k} ${y}L${from + k + 1} ${y}`;
    });
    parts.push(svg("rect", {class: `ground ${letter}`, x: from, y: 0, width: to - from, height: 40}),
      svg("path", {class: `area ${letter}`, d: `M${from} 40${heights.join("")}L${to} 40Z`}),
      svg("rect", {class: letter, x: from, y: 38, width: to - from, height: 2}));
    from = to;
  }
  $("memory").append(svg("svg", {viewBox: `0 0 ${n} 40`, preserveAspectRatio: "none"}, parts));
  $("slider").max = n - 1;
  const forward = steps.filter(([kind]) => kind === FORWARD).length;
  $("legend").append(el("b", {class: "forward"}, `forward, ${forward}`), el("span", {class: "held"}),
    n > forward ? el("b", {class: "backward"}, `${n - forward}, backward`) : el("span", {}, "no backward pass"));
}

// --------------------------------------------------------------------------------------------------- finding

const findable = [
  ...nodes.map((node, i) => ({text: named(i), where: node.module || node.line, go: () => show(stepOf(i))})),
  ...leaves.map((leaf, i) => ({text: leaf.name, where: times(leaf.shape), go: () => showLeaf(i)})),
];
(function modules(box) {
  for (const item of box.items) if (item.items) {
    findable.push({text: item.path, where: plural(item.last - item.first + 1, "node"), go: () => {
      show(stepsOfNode[item.first][0]);
      setOpen(item, true);
    }});
    modules(item);
  }
})(root);
let matches = [], pointed = 0;

function find() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), rank = thing => {
    const said = thing.text.toLowerCase();
    return said.startsWith(words[0]) || said.includes(" " + words[0]) || thing.where.endsWith("." + words[0]) ? 0 : said.includes(words[0]) ? 1 : 2;
  };
  matches = words.length ? findable.filter(thing => words.every(word =>
    `${thing.text} ${thing.where}`.toLowerCase().includes(word))).sort((a, b) => rank(a) - rank(b)).slice(0, 40) : [];
  pointed = 0;
  list();
}
function list() {
  $("found").hidden = !$("search").value.trim();
  $("search").setAttribute("aria-expanded", !$("found").hidden);
  $("found").replaceChildren(...matches.map((thing, i) => el("li", {id: `found-${i}`, role: "option",
    "aria-selected": i === pointed, onmousedown: event => {
      event.preventDefault();
      take(i);
    }}, el("span", {}, thing.text), el("span", {class: "where"}, thing.where))),
    matches.length ? "" : el("li", {role: "option", "aria-disabled": "true"}, "Nothing of that name"));
  if (matches.length) $("search").setAttribute("aria-activedescendant", `found-${pointed}`);
  else $("search").removeAttribute("aria-activedescendant");
  $("found").children[pointed]?.scrollIntoView({block: "nearest"});
}
function take(i) {
  const thing = matches[i];
  $("search").value = "";
  list();
  if (!thing) return;
  pause();
  thing.go();
  $("panel").focus({preventScroll: true});
}
$("search").addEventListener("input", find);
$("search").addEventListener("blur", () => { $("found").hidden = true; });
$("search").addEventListener("keydown", event => {
  if (event.key === "Enter") take(pointed);
  else if (event.key === "Escape") {
    $("search").value = "";
    list();
    $("search").blur();
  } else if (matches.length && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    pointed = (pointed + (event.key === "ArrowDown" ? 1 : matches.length - 1)) % matches.length;
    list();
  } else return;
  event.preventDefault();
});

// ------------------------------------------------------------------------------------------------------ start

document.addEventListener("keydown", event => {
  const at = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || at === $("search")) return;
  if (at.classList?.contains("scroll") && at.scrollWidth > at.clientWidth && event.key.startsWith("Arrow")) return;
  const pressed = at.closest?.("button, summary, label, [type=checkbox]");
  const box = drawn.filter(({item}) => item && item.items && holds(item, focusNode())).at(-1);
  const does = {
    ArrowRight: () => show(now.step + 1), ArrowLeft: () => show(now.step - 1), Home: () => show(0),
    End: () => show(steps.length - 1), "/": () => $("search").focus(), "?": () => $("help").showModal(),
    b: () => focusNode() >= 0 && show(stepOf(focusNode(), true)),
    " ": pressed ? null : play,
    Enter: pressed || !box ? null : () => setOpen(box.item, !isOpen(box.item)),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  if (event.key !== " ") pause();
  does();
});
$("slider").addEventListener("input", () => { pause(); show(Number($("slider").value)); });
$("back").addEventListener("click", () => { pause(); show(now.step - 1); });
$("next").addEventListener("click", () => { pause(); show(now.step + 1); });
$("play").addEventListener("click", play);
$("ask").addEventListener("click", () => $("help").showModal());
$("follow").addEventListener("change", () => {
  following = $("follow").checked;
  drawGraph();
  markGraph(true);
});
for (const [id, open] of [["unfold", true], ["fold", false]])
  $(id).addEventListener("click", () => {
    (function each(box) {
      for (const item of box.items) if (item.items) {
        chosen.set(item.key, open);
        each(item);
      }
    })(root);
    drawGraph();
    markGraph(true);
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  now.leaf === null ? show(now.step, {quiet: true}) : showLeaf(now.leaf));

$("summary").textContent = [plural(nodes.length, "node"), `${leaves.length} ${leaves.length === 1 ? "leaf" : "leaves"}`,
  runs ? `${runs} backward pass${runs === 1 ? "" : "es"}` : ""].filter(Boolean).join(" · ");
drawTime();
show((parseInt(location.hash.slice(1), 10) || 1) - 1, {quiet: true});
