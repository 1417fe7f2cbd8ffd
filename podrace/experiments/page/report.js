'use strict'
// Draws the report out of the JSON in the page. All text goes in as text, never as HTML.
const data = JSON.parse(document.getElementById('data').textContent)
const COLOURS = data.colours
const SVG = 'http://www.w3.org/2000/svg'
const main = document.querySelector('main')
const shown = new Set(data.groups.map((group, i) => i)) // groups: runs that differ by their seed only
const redraws = []

function make(tag, attributes = {}, ...children) {
  const svg = ['svg', 'path', 'line', 'text', 'circle', 'g', 'title'].includes(tag)
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  node.append(...children)
  return node
}

function section(id, title) {
  const found = make('section', { id }, make('h2', {}, title))
  document.querySelector('nav').append(make('a', { href: `#${id}` }, title))
  main.append(found)
  return found
}

function number(x) {
  if (x === null || x === undefined) return '–'
  if (typeof x !== 'number') return String(x)
  const size = Math.abs(x)
  // A half goes to the even number, as Python rounds where `podrace runs` writes it.
  if (size >= 1e3) return x.toLocaleString('en', { maximumFractionDigits: 0, roundingMode: 'halfEven' })
  return size && size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)))
}

function short(x) {
  for (const [size, unit] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(x) >= size) return `${Number((x / size).toPrecision(3))}${unit}`
  }
  return number(x)
}

function interval(center, low, high) { return `${number(center)} (${number(low)} to ${number(high)})` }
function scored(x) { return x === null || x.low === null ? x && x.mean : interval(x.mean, x.low, x.high) }

function table(head, rows) {
  const body = rows.map(row => make('tr', row.differs ? { class: 'differs' } : {}, ...row.cells.map((cell, i) => {
    const inside = cell instanceof Node ? cell : typeof cell === 'string' ? cell : number(cell)
    return i === 0 ? make('th', { scope: 'row' }, inside) : make('td', kind(cell), inside)
  })))
  const top = make('thead', {}, make('tr', {}, ...head.map(h => make('th', { scope: 'col' }, h))))
  return make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': head[0] },
    make('table', {}, top, make('tbody', {}, ...body)))
}

function kind(cell) {
  if (typeof cell === 'number' || cell === null) return { class: 'number' }
  return typeof cell === 'string' && cell.length > 40 ? { class: 'long' } : {}
}

const DASHES = ['', '6 3', '2 2', '7 3 2 3'], BORDERS = ['solid', 'dashed', 'dotted', 'double']

// A name with its line.
function entry(name, colour, dash) {
  const swatch = make('span', { class: 'swatch', 'aria-hidden': 'true' })
  swatch.style.borderTopStyle = BORDERS[DASHES.indexOf(dash)]
  swatch.style.borderTopColor = colour
  return make('span', { class: 'entry' }, swatch, name)
}

function named(i, name = `${data.groups[i].full_name} (n=${data.groups[i].n})`) { return entry(name, colour(i), dash(i)) }
function run(i) { return data.runs[i].group === null ? data.runs[i].name : named(data.runs[i].group, data.runs[i].name) }
function colour(i) { return COLOURS[i % COLOURS.length] }
function dash(i) { return DASHES[Math.floor(i / COLOURS.length) % DASHES.length] }

// --- charts ---------------------------------------------------------------------------------

function ticks(low, high, count) {
  const step0 = (high - low || 1) / count
  const power = 10 ** Math.floor(Math.log10(step0))
  const step = power * [1, 2, 5, 10].find(m => m * power >= step0)
  const found = []
  const first = Math.ceil(low / step)
  for (let k = 0; k <= 3 * count; k++) { // bounded: t + step is t where step is tiny
    const t = (first + k) * step
    if (t > high + step * 1e-9) break
    found.push(Math.abs(t) < step * 1e-9 ? 0 : t)
  }
  return found
}

// series: () => [{name, colour, dash, points: [[x, y, low, high], ...]}], none if their runs are hidden.
// Without an interval low and high are null. A chart is left out if nothing was recorded for it.
function chart(parent, title, xLabel, yLabel, series, hasLegend = false) {
  const svg = make('svg', { tabindex: 0, role: 'img' })
  const readout = make('div', { class: 'readout', role: 'status', 'aria-live': 'polite' })
  const hidden = make('details', {}, make('summary', {}, 'as a table'))
  const legend = make('div', { class: 'legend' })
  const panel = make('div', { class: 'panel' }, make('h3', {}, title), ...(hasLegend ? [legend] : []), svg, readout, hidden)
  parent.append(panel)
  let at = null, lines = [], xs = [], scaleX = x => x, scaleY = y => y, bottom = 0, width = 0
  const M = { left: 62, right: 14, top: 8, bottom: 38 }

  function draw() {
    width = Math.max(260, panel.clientWidth - 26)
    const height = Math.min(300, Math.max(190, width * .55))
    const every = series()
    lines = every.filter(s => s.points.length)
    legend.replaceChildren(...lines.map(s => entry(s.name, s.colour, s.dash)))
    svg.replaceChildren()
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`)
    svg.setAttribute('aria-label', `${title}: ${yLabel()} over ${xLabel()}, ${lines.map(s => s.name).join(', ')}`)
    const points = lines.flatMap(s => s.points)
    panel.hidden = every.length > 0 && !points.length
    xs = []
    if (!points.length) {
      readout.textContent = 'its runs are hidden'
      hidden.replaceChildren(make('summary', {}, 'as a table'))
      return
    }
    readout.textContent = ''
    xs = [...new Set(points.map(p => p[0]))].sort((a, b) => a - b)
    const ys = points.flatMap(p => p.slice(1).filter(y => y !== null))
    let low = ys.reduce((a, y) => Math.min(a, y), Infinity), high = ys.reduce((a, y) => Math.max(a, y), -Infinity)
    if (low === high) { low -= Math.abs(low) * .1 || 1; high += Math.abs(high) * .1 || 1 }
    const left = Math.min(0, xs[0]), right = xs[xs.length - 1] || 1
    bottom = height - M.bottom
    scaleX = x => M.left + (x - left) / (right - left || 1) * (width - M.left - M.right)
    scaleY = y => bottom - (y - low) / (high - low) * (bottom - M.top)
    for (const t of ticks(low, high, 4)) {
      svg.append(make('line', { class: 'grid', x1: M.left, x2: width - M.right, y1: scaleY(t), y2: scaleY(t) }),
        make('text', { x: M.left - 6, y: scaleY(t) + 4, 'text-anchor': 'end' }, short(t)))
    }
    for (const t of ticks(left, right, width / 110)) {
      svg.append(make('text', { x: scaleX(t), y: bottom + 15, 'text-anchor': 'middle' }, short(t)))
    }
    svg.append(make('text', { x: (M.left + width) / 2, y: height - 5, 'text-anchor': 'middle' }, xLabel()),
      make('text', { transform: `translate(12 ${(bottom + M.top) / 2}) rotate(-90)`, 'text-anchor': 'middle' }, yLabel()))
    for (const s of lines) {
      const known = s.points.filter(p => p[2] !== null && p[3] !== null)
      if (known.length) {
        svg.append(make('path', { class: 'band', fill: s.colour,
          d: `${path(known.map(p => [p[0], p[3]]))}${path(known.map(p => [p[0], p[2]]).reverse()).replace('M', 'L')}Z` }))
      }
    }
    for (const s of lines) {
      svg.append(make('path', { class: 'line', d: path(s.points), stroke: s.colour, 'stroke-dasharray': s.dash || '' }))
      if (s.points.length === 1) svg.append(make('circle', { cx: scaleX(s.points[0][0]), cy: scaleY(s.points[0][1]), r: 3, fill: s.colour }))
    }
    // Lines have steps of their own: the rows are those of the longest one, and the rest is taken from nearby.
    const steps = lines.reduce((a, s) => s.points.length > a.points.length ? s : a).points.map(p => p[0])
    const rows = steps.filter((x, i) => i % Math.ceil(steps.length / 100) === 0 || i === steps.length - 1)
    const gap = (xs[xs.length - 1] - xs[0]) / rows.length
    hidden.replaceChildren(make('summary', {}, 'as a table'), table([xLabel(), ...lines.map(s => s.name)],
      rows.map(x => ({ cells: [number(x), ...lines.map(s => { const p = nearest(s, x); return Math.abs(p[0] - x) <= gap ? valued(p) : null })] }))))
    point(at)
  }

  function path(points) {
    return points.map((p, i) => `${i ? 'L' : 'M'}${scaleX(p[0]).toFixed(1)} ${scaleY(p[1]).toFixed(1)}`).join('')
  }

  function nearest(s, x) { return s.points.reduce((a, p) => Math.abs(p[0] - x) < Math.abs(a[0] - x) ? p : a) }

  function valued(p) { return p[2] === null ? p[1] : interval(p[1], p[2], p[3]) }

  function point(i) {
    svg.querySelectorAll('.at').forEach(node => node.remove())
    at = i
    if (i === null || !xs.length) { if (xs.length) readout.textContent = ''; return }
    at = Math.min(Math.max(i, 0), xs.length - 1)
    const x = xs[at]
    svg.append(make('line', { class: 'cursor at', x1: scaleX(x), x2: scaleX(x), y1: M.top, y2: bottom }))
    const parts = lines.map(s => {
      const p = nearest(s, x)
      svg.append(make('circle', { class: 'at', cx: scaleX(x), cy: scaleY(p[1]), r: 3.5, fill: s.colour }))
      return `${s.name} ${typeof valued(p) === 'number' ? number(p[1]) : valued(p)}`
    })
    readout.textContent = `${xLabel()} ${number(x)}: ${parts.join(', ')}`
  }

  svg.addEventListener('pointermove', event => {
    if (!xs.length) return
    const box = svg.getBoundingClientRect()
    const where = (event.clientX - box.left) * width / box.width
    let best = 0
    xs.forEach((x, i) => { if (Math.abs(scaleX(x) - where) < Math.abs(scaleX(xs[best]) - where)) best = i })
    point(best)
  })
  svg.addEventListener('pointerleave', () => point(null))
  svg.addEventListener('keydown', event => {
    const page = Math.max(1, Math.round(xs.length / 10))
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageUp: page, PageDown: -page, Home: -Infinity, End: Infinity }
    if (event.key === 'Escape') point(null)
    else if (event.key in moves) {
      event.preventDefault()
      const next = (at === null ? (moves[event.key] > 0 ? -1 : xs.length) : at) + moves[event.key]
      point(Math.min(Math.max(next, 0), xs.length - 1))
    }
  })
  redraws.push(draw)
  return draw
}

function pointsOf(band) {
  if (!band) return []
  const [x, center, low, high] = band
  return x.map((value, i) => [value, center[i], low[i], high[i]])
}

function points(group, metric, axis) {
  return pointsOf(Object.hasOwn(group.bands, metric) ? group.bands[metric][axis] : null)
}

const AXES = { step: 'environment steps', wall_s: 'wall time (s)', gradient_steps_total: 'gradient steps' }
let axis = 'step'

const ENVS = [...new Set(data.groups.map(group => group.env))]

// The lines of the groups that are shown; of those in one environment, if it is given.
function linesOf(pointsOfGroup, env) {
  return () => data.groups.flatMap((group, i) => shown.has(i) && (env === undefined || group.env === env)
    ? [{ name: `${env === undefined ? group.full_name : group.name} (n=${group.n})`, colour: colour(i), dash: dash(i), points: pointsOfGroup(group) }] : [])
}

// A chart for each environment in which a group has something to show.
function charts(parent, title, xLabel, yLabel, pointsOfGroup, applies = group => pointsOfGroup(group).length) {
  return ENVS.filter(env => data.groups.some(group => group.env === env && applies(group))).map(env =>
    chart(parent, ENVS.length > 1 ? `${title}: ${env}` : title, xLabel, () => yLabel(env), linesOf(pointsOfGroup, env), data.groups.length > 1))
}

// --- the page -------------------------------------------------------------------------------

document.getElementById('made').textContent = `${data.runs.length} run${data.runs.length === 1 ? '' : 's'}, podrace ${data.version}, ${data.made}`

const runs = section('runs', 'Runs')
runs.append(table(['run', 'state', 'agent', 'environment', 'architecture', 'steps', 'of', 'return', 'steps/s', 'wall time (s)'],
  data.runs.map((r, i) => ({ cells: [run(i), r.why ? `${r.state}: ${r.why}` : r.state, r.sweep ? `${r.agent} (sweep)` : r.agent, r.env || (r.log && `log ${r.log}`), r.architecture,
    r.step, r.total_steps, r.episode_return, r.steps_per_s, r.wall_s] }))))
for (const text of data.left_out) runs.append(make('p', { class: 'note' }, `left out: ${text}`))

const curves = section('curves', 'Curves')
const choose = make('select', { 'aria-label': 'horizontal axis' }, ...Object.entries(AXES).map(([k, v]) => make('option', { value: k }, v)))
choose.addEventListener('change', () => { axis = choose.value; redraws.forEach(draw => draw()) })
const controls = make('div', { class: 'controls' }, make('label', {}, 'over ', choose))
if (data.groups.length > 1) {
  data.groups.forEach((group, i) => {
    const button = make('button', { type: 'button', 'aria-pressed': 'true' }, named(i))
    button.addEventListener('click', () => {
      if (shown.has(i)) shown.delete(i); else shown.add(i)
      button.setAttribute('aria-pressed', String(shown.has(i)))
      redraws.forEach(draw => draw())
    })
    controls.append(button)
  })
}
const panels = make('div', { class: 'panels' })
const isBand = data.groups.some(group => group.n > 1)
curves.append(controls, make('p', { class: 'note' }, isBand ? 'Line: mean over n seeds. Band: 95% bootstrap interval.' : 'One seed each: no interval.',
  ' Point at a chart for values, or focus it and use the arrow keys, Home, End and Escape.'), panels)
charts(panels, 'Return', () => AXES[axis], env => `episode return${data.groups.some(group => group.env === env && group.log) ? ' of the log' : ''}`, group => points(group, 'episode_return', axis))
charts(panels, 'Evaluations, greedy', () => 'environment steps', () => 'episode return', group => pointsOf(group.evaluations))
const all = [...new Set(data.groups.flatMap(group => Object.keys(group.bands)))].filter(name => name !== 'episode_return').sort()
const pick = make('select', { 'aria-label': 'metric' }, ...all.map(name => make('option', { value: name }, name)))
if (all.length) {
  // The metric that tells most of the agents, if all of them have it.
  const telling = data.groups.map(group => group.telling).filter(name => data.groups.every(group => Object.hasOwn(group.bands, name)))
  pick.value = telling[0] || (all.includes('loss') ? 'loss' : all[0])
  controls.append(make('label', {}, 'any metric ', pick))
  const meaning = make('p', { class: 'note meaning' })
  const explain = () => {
    const each = data.groups.filter(group => Object.hasOwn(group.bands, pick.value)).map(group => [group.agent, group.meanings[pick.value]])
    const texts = new Set(each.map(pair => pair[1]).filter(text => text))
    meaning.textContent = texts.size === 1 ? `${pick.value}: ${[...texts][0]}`
      : [...new Map(each.filter(pair => pair[1]))].map(([agent, text]) => `${pick.value} of ${agent}: ${text}`).join(' ')
  }
  const draws = charts(panels, 'Any metric', () => AXES[axis], () => pick.value, group => points(group, pick.value, axis), () => true)
  panels.after(meaning)
  explain()
  pick.addEventListener('change', () => { draws.forEach(draw => draw()); explain() })
}

const speed = section('speed', 'Throughput, and where time went')
const speeds = make('div', { class: 'panels' })
speed.append(speeds)
charts(speeds, 'Speed', () => AXES[axis], () => 'steps/s', group => points(group, 'steps_per_s', axis))
const SHARES = ['actor_env', 'actor_inference', 'actor_transfer', 'actor_waiting']
const SHARE_COLOURS = ['#8c6bd8', '#98981f', '#c23b5a', '#7d8790'] // none of a group's
data.groups.forEach(group => {
  if (!SHARES.some(name => name in group.bands)) return
  chart(speeds, `Actor threads: ${group.full_name}`, () => AXES[axis], () => 'share of time', () => SHARES.map((name, k) => ({
    name: name.replace('actor_', ''), colour: SHARE_COLOURS[k], dash: DASHES[k], points: points(group, name, axis) })), true)
})
charts(speeds, 'Lag of the acting policy', () => AXES[axis], () => 'updates', group => points(group, 'policy_lag_mean', axis))
speed.append(table(['run', 'steps/s of the run', 'compilation (s)', 'machine'],
  data.runs.map((r, i) => ({ cells: [run(i), r.steps_per_s, r.compile_s, r.machine] }))))

const scores = section('scores', 'Scores')
const isAnchored = data.groups.some(group => group.anchors) // no other environments have them
scores.append(table(['line', 'seeds', 'return, last tenth', 'last evaluation', ...(isAnchored ? ['anchors', 'human-normalized'] : [])],
  data.groups.map((g, i) => ({ cells: [named(i, g.full_name), g.n, scored(g.final), scored(g.evaluated),
    ...(isAnchored ? [g.anchors || 'none known', g.normalized] : [])] }))))

if (data.runs.some(run => run.diagnoses.length)) {
  section('diagnostics', 'Signs that a run does not learn').append(table(['run', 'step', 'sign'],
    data.runs.flatMap((r, i) => r.diagnoses.map(d => ({ cells: [run(i), d.step, d.message] })))))
}

if (data.runs.some(run => run.changes.length)) {
  section('changes', 'Settings that changed').append(table(['run', 'from step', 'setting'],
    data.runs.flatMap((r, i) => r.changes.map(c => ({ cells: [run(i), c.step, c.text] })))))
}

const faults = section('faults', 'Faults survived')
faults.append(table(['run', 'environments restarted', 'steps lost with them', 'damaged checkpoints', 'how it ended'],
  data.runs.map((r, i) => ({ cells: [run(i), r.faults.env_restarts, r.faults.dropped_steps, r.faults.damaged, r.why ? `${r.state}: ${r.why}` : r.state] }))))

if (data.runs.some(run => run.videos.length || run.videos_left_out.length)) {
  const videos = section('videos', 'Videos')
  const grid = make('div', { class: 'panels' })
  videos.append(grid)
  data.runs.forEach(run => {
    const earlier = make('details', {}, make('summary', {}, 'earlier videos'))
    run.videos.forEach((v, i) => { // the newest comes first
      const film = v.kind === 'mp4' ? make('video', { controls: '', loop: '', muted: '', src: v.data }) : make('img', { src: v.data, alt: v.name })
      const figure = make('figure', { class: 'panel' }, film, make('figcaption', {}, `${run.name}: ${v.name}`))
      if (i) earlier.append(figure); else { grid.append(figure); figure.append(...(run.videos.length > 1 ? [earlier] : [])) }
    })
    for (const text of run.videos_left_out) videos.append(make('p', { class: 'note' }, `left out: ${text}`))
  })
}

// A column for each group; runs of a group may differ in their seeds and a few more settings.
const config = section('configuration', 'Configuration')
const paths = [...new Set(data.runs.flatMap(run => Object.keys(run.config)))]
const columns = [...data.groups.map((group, i) => [`${group.full_name} (n=${group.n})`, data.runs.filter(run => run.group === i)]).filter(([, members]) => members.length),
  ...data.runs.filter(run => run.group === null).map(run => [run.name, [run]])]
const rows = paths.map(path => {
  const values = columns.map(([, members]) =>
    [...new Set(members.map(run => Object.hasOwn(run.config, path) ? String(run.config[path]) : '–'))].join(', '))
  return { cells: [path, ...values], differs: new Set(values).size > 1 }
})
rows.sort((a, b) => b.differs - a.differs)
config.append(table(['setting', ...columns.map(column => column[0])], rows))

redraws.forEach(draw => draw())
let pending = 0
window.addEventListener('resize', () => {
  cancelAnimationFrame(pending)
  pending = requestAnimationFrame(() => redraws.forEach(draw => draw()))
})
