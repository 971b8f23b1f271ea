// Which curves say something: flat ones and noise come last, and equal ones are shown once.

const SMOOTH = 10; // points, from which on noise can be told from a trend
const NOISE = 1.5; // of von Neumann's ratio, which is 2 for white noise and near 0 for a trend

// Whether all values of each line are equal, or differ by no more than `tolerance`.
export function isFlat(lines, tolerance = 0) {
  const long = lines.filter((points) => points.length > 1);
  return long.length > 0 && long.every((points) => points.every(([, value]) => Math.abs(value - points[0][1]) <= Math.max(tolerance, 1e-9 * Math.abs(points[0][1]))));
}

export function isNoise(lines) {
  const long = lines.filter((points) => points.length >= SMOOTH);
  return long.length > 0 && long.every((points) => ratio(points.map(([, value]) => value)) > NOISE);
}

function ratio(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const spread = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  const jumps = values.slice(1).reduce((sum, value, i) => sum + (value - values[i]) ** 2, 0);
  return spread ? jumps / spread : 0;
}

// Names by the first name with the same points in every run; series that are flat or short prove nothing.
export function merged(names, lines) {
  const first = new Map();
  const others = new Map();
  for (const name of names) {
    const series = lines(name);
    const key = isFlat(series) || !series.some((points) => points.length > 2) ? name : JSON.stringify(series);
    if (!first.has(key)) first.set(key, name);
    const kept = first.get(key);
    others.set(kept, [...(others.get(kept) ?? []), name]);
  }
  return others;
}
