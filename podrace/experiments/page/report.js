'use strict'
// Draws the report out of the JSON in the page. All text goes in as text, never as HTML.
const data = JSON.parse(document.getElementById('data').textContent)
const COLOURS = data.colours
const SVG = 'http://www.w3.org/2000/svg'
const main = document.querySelector('main')
const shown = new Set(data.runs.map((run, i) => i))
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

function named(i) { return entry(data.runs[i].name, colour(i), dash(i)) }
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

// series: () => [{name, colour, dash, points: [[x, y], ...]}], none if their runs are hidden
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
    xs = []
    if (!points.length) {
      readout.textContent = every.length ? 'nothing was recorded' : 'its runs are hidden'
      hidden.replaceChildren(make('summary', {}, 'as a table'))
      return
    }
    readout.textContent = ''
    xs = [...new Set(points.map(p => p[0]))].sort((a, b) => a - b)
    let low = points.reduce((a, p) => Math.min(a, p[1]), Infinity), high = points.reduce((a, p) => Math.max(a, p[1]), -Infinity)
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
      const d = s.points.map((p, i) => `${i ? 'L' : 'M'}${scaleX(p[0]).toFixed(1)} ${scaleY(p[1]).toFixed(1)}`).join('')
      svg.append(make('path', { d, fill: 'none', stroke: s.colour, 'stroke-width': 1.8, 'stroke-dasharray': s.dash || '' }))
      if (s.points.length === 1) svg.append(make('circle', { cx: scaleX(s.points[0][0]), cy: scaleY(s.points[0][1]), r: 3, fill: s.colour }))
    }
    const rows = xs.filter((x, i) => i % Math.ceil(xs.length / 100) === 0 || i === xs.length - 1)
    hidden.replaceChildren(make('summary', {}, 'as a table'), table([xLabel(), ...lines.map(s => s.name)],
      rows.map(x => ({ cells: [number(x), ...lines.map(s => nearest(s, x, true))] }))))
    point(at)
  }

  function nearest(s, x, exact) {
    let best = null
    for (const p of s.points) if (best === null || Math.abs(p[0] - x) < Math.abs(best[0] - x)) best = p
    return best === null || (exact && best[0] !== x) ? null : best[1]
  }

  function point(i) {
    svg.querySelectorAll('.at').forEach(node => node.remove())
    at = i
    if (i === null || !xs.length) { if (xs.length) readout.textContent = ''; return }
    at = Math.min(Math.max(i, 0), xs.length - 1)
    const x = xs[at]
    svg.append(make('line', { class: 'cursor at', x1: scaleX(x), x2: scaleX(x), y1: M.top, y2: bottom }))
    const parts = lines.map(s => {
      const y = nearest(s, x, false)
      svg.append(make('circle', { class: 'at', cx: scaleX(x), cy: scaleY(y), r: 3.5, fill: s.colour }))
      return `${s.name} ${number(y)}`
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

function column(run, metric) { return Object.hasOwn(run.metrics, metric) ? run.metrics[metric] : [] }

function points(run, metric, axis) {
  const y = column(run, metric), x = column(run, axis)
  return y.map((value, i) => [x[i], value]).filter(p => p[0] !== null && p[0] !== undefined && p[1] !== null)
}

const AXES = { step: 'environment steps', wall_s: 'wall time (s)', gradient_steps_total: 'gradient steps' }
let axis = 'step'

// The lines of the runs that are shown; of those in one environment, if it is given.
function linesOf(pointsOf, env) {
  return () => data.runs.flatMap((run, i) => shown.has(i) && (env === undefined || run.env === env)
    ? [{ name: run.name, colour: colour(i), dash: dash(i), points: pointsOf(run) }] : [])
}

function byRun(metric) { return linesOf(run => points(run, metric, axis)) }

const ENVS = [...new Set(data.runs.map(run => run.env))]

// A chart for each environment in which a run has something to show.
function charts(parent, title, xLabel, yLabel, pointsOf, applies = run => pointsOf(run).length) {
  const several = ENVS.length > 1
  return ENVS.filter(env => data.runs.some(run => run.env === env && applies(run))).map(env =>
    chart(parent, several ? `${title}: ${env}` : title, xLabel, yLabel, linesOf(pointsOf, env), several))
}

// --- the page -------------------------------------------------------------------------------

document.getElementById('made').textContent = `${data.runs.length} run${data.runs.length === 1 ? '' : 's'}, podrace ${data.version}, ${data.made}`

const runs = section('runs', 'Runs')
runs.append(table(['run', 'state', 'agent', 'environment', 'architecture', 'steps', 'of', 'return', 'steps/s', 'wall time (s)', 'machine'],
  data.runs.map((r, i) => ({ cells: [named(i), r.why ? `${r.state}: ${r.why}` : r.state, r.sweep ? `${r.agent} (sweep)` : r.agent, r.env, r.architecture,
    r.step, r.total_steps, r.episode_return, r.steps_per_s, r.wall_s, r.machine] }))))
for (const text of data.left_out) runs.append(make('p', { class: 'note' }, `left out: ${text}`))

const curves = section('curves', 'Curves')
const choose = make('select', { 'aria-label': 'horizontal axis' }, ...Object.entries(AXES).map(([k, v]) => make('option', { value: k }, v)))
choose.addEventListener('change', () => { axis = choose.value; redraws.forEach(draw => draw()) })
const controls = make('div', { class: 'controls' }, make('label', {}, 'over ', choose))
if (data.runs.length > 1) {
  data.runs.forEach((run, i) => {
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
curves.append(controls, make('p', { class: 'note' }, 'Point at a chart for values, or focus it and use the arrow keys, Home, End and Escape.'), panels)
const has = metric => data.runs.some(run => column(run, metric).some(x => x !== null))
charts(panels, 'Return', () => AXES[axis], () => 'episode return', run => points(run, 'episode_return', axis))
charts(panels, 'Evaluations, greedy', () => 'environment steps', () => 'episode return',
  run => run.evaluations.step.map((x, k) => [x, run.evaluations.mean[k]]).filter(p => p[1] !== null))
const all = [...new Set(data.runs.flatMap(run => Object.keys(run.metrics)))]
  .filter(name => !['step', 'wall_s', 'gradient_steps_total', 'episode_return'].includes(name) && has(name)).sort()
const pick = make('select', { 'aria-label': 'metric' }, ...all.map(name => make('option', { value: name }, name)))
if (all.includes('loss')) pick.value = 'loss'
if (all.length) {
  controls.append(make('label', {}, 'any metric ', pick))
  const draws = charts(panels, 'Any metric', () => AXES[axis], () => pick.value, run => points(run, pick.value, axis), () => true)
  pick.addEventListener('change', () => draws.forEach(draw => draw()))
}

const speed = section('speed', 'Throughput, and where time went')
const speeds = make('div', { class: 'panels' })
speed.append(speeds)
chart(speeds, 'Speed', () => AXES[axis], () => 'steps/s', byRun('steps_per_s'))
const SHARES = ['actor_env', 'actor_inference', 'actor_transfer', 'actor_waiting']
const SHARE_COLOURS = ['#8c6bd8', '#98981f', '#c23b5a', '#7d8790'] // none of a run's
data.runs.forEach((run, i) => {
  if (!SHARES.some(name => name in run.metrics)) return
  chart(speeds, `Actor threads: ${run.name}`, () => AXES[axis], () => 'share of time', () => SHARES.map((name, k) => ({
    name: name.replace('actor_', ''), colour: SHARE_COLOURS[k], dash: DASHES[k], points: points(run, name, axis) })), true)
})
if (has('policy_lag_mean')) chart(speeds, 'Lag of the acting policy', () => AXES[axis], () => 'updates', byRun('policy_lag_mean'))
speed.append(table(['run', 'compilation (s)', 'wall time (s)', 'steps/s of the run'],
  data.runs.map((r, i) => ({ cells: [named(i), r.compile_s, r.wall_s, r.steps_per_s] }))))

const scores = section('scores', 'Scores')
const isAnchored = data.runs.some(run => run.anchors) // no other environments have them
scores.append(table(['run', 'return, last tenth', 'last evaluation', ...(isAnchored ? ['anchors', 'human-normalised'] : [])],
  data.runs.map((r, i) => ({ cells: [named(i), r.score, r.evaluations.mean.length ? r.evaluations.mean[r.evaluations.mean.length - 1] : null,
    ...(isAnchored ? [r.anchors || 'none known', r.normalised] : [])] }))))

if (data.runs.some(run => run.diagnoses.length)) {
  section('diagnostics', 'Signs that a run does not learn').append(table(['run', 'step', 'sign'],
    data.runs.flatMap((r, i) => r.diagnoses.map(d => ({ cells: [named(i), d.step, d.message] })))))
}

if (data.runs.some(run => run.changes.length)) {
  section('changes', 'Settings that changed').append(table(['run', 'from step', 'setting'],
    data.runs.flatMap((r, i) => r.changes.map(c => ({ cells: [named(i), c.step, c.text] })))))
}

const faults = section('faults', 'Faults survived')
faults.append(table(['run', 'environments restarted', 'steps lost with them', 'damaged checkpoints', 'how it ended'],
  data.runs.map((r, i) => ({ cells: [named(i), r.faults.env_restarts, r.faults.dropped_steps, r.faults.damaged, r.why ? `${r.state}: ${r.why}` : r.state] }))))

if (data.runs.some(run => run.videos.length || run.videos_left_out.length)) {
  const videos = section('videos', 'Videos')
  const grid = make('div', { class: 'panels' })
  videos.append(grid)
  data.runs.forEach(run => {
    for (const v of run.videos) {
      const film = v.kind === 'mp4' ? make('video', { controls: '', loop: '', muted: '', src: v.data }) : make('img', { src: v.data, alt: v.name })
      grid.append(make('figure', { class: 'panel' }, film, make('figcaption', {}, `${run.name}: ${v.name}`)))
    }
    for (const text of run.videos_left_out) videos.append(make('p', { class: 'note' }, `left out: ${text}`))
  })
}

const config = section('configuration', 'Configuration')
const paths = [...new Set(data.runs.flatMap(run => Object.keys(run.config)))]
const rows = paths.map(path => {
  const values = data.runs.map(run => Object.hasOwn(run.config, path) ? String(run.config[path]) : '–')
  return { cells: [path, ...values], differs: new Set(values).size > 1 }
})
rows.sort((a, b) => b.differs - a.differs)
config.append(table(['setting', ...data.runs.map(run => run.name)], rows))

redraws.forEach(draw => draw())
let pending = 0
window.addEventListener('resize', () => {
  cancelAnimationFrame(pending)
  pending = requestAnimationFrame(() => redraws.forEach(draw => draw()))
})
