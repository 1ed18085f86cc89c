//! Best cuts of a sorted row: shortest paths whose edges are a size times a boundary weight.

use crate::runtime::ambient::asked;

/// No cut: this piece goes to the end.
const NONE: u32 = u32::MAX;

/// Costs with at most 0, 1, .. cuts, from every start, and the first cut of each.
pub(super) struct Layers {
    pub(super) costs: Vec<Vec<f64>>,
    cuts: Vec<Vec<u32>>,
}

impl Layers {
    /// Returns the cuts of a best path from `start` with at most `most` cuts, in path order.
    pub(super) fn path(&self, most: usize, start: usize) -> Vec<usize> {
        let (mut path, mut at) = (Vec::new(), start);
        for layer in (1..=most.min(self.costs.len() - 1)).rev() {
            let cut = self.cuts[layer - 1][at];
            if cut != NONE {
                at = cut as usize;
                path.push(at);
            }
        }
        path
    }
}

/// Lower envelope of lines `slope x + offset`, asked at points that favour later lines ever more.
#[derive(Default)]
struct Envelope {
    lines: Vec<(f64, f64, u32)>,
    /// First line that may still be the minimum.
    front: usize,
}

impl Envelope {
    fn clear(&mut self) {
        self.lines.clear();
        self.front = 0;
    }

    fn push(&mut self, slope: f64, offset: f64, name: u32) {
        while let [.., first, second] = self.lines[self.front..] {
            // The newest line overtakes the older one before the middle one does.
            let newest = (offset - first.1) * (second.0 - first.0).abs();
            let middle = (second.1 - first.1) * (slope - first.0).abs();
            if newest > middle {
                break;
            }
            self.lines.pop();
        }
        self.lines.push((slope, offset, name));
    }

    /// Returns the name of the line that is least at `x`; at least one line has been pushed.
    fn best(&mut self, x: f64) -> u32 {
        let value = |line: &(f64, f64, u32)| line.0 * x + line.1;
        let mut least = value(&self.lines[self.front]);
        while let Some(next) = self.lines.get(self.front + 1).map(value)
            && next <= least
        {
            least = next;
            self.front += 1;
        }
        self.lines[self.front].2
    }
}

/// Returns `costs[t][i]`: the least upper sum of the descending `weights[i..]`, with at most t cuts. `trace` records
/// the cuts.
pub(super) fn of_tails(weights: &[f64], most: usize, trace: bool) -> Layers {
    let n = weights.len();
    let first = (0..n).map(|i| (n - i) as f64 * weights[i]).collect();
    let mut layers = Layers { costs: vec![first], cuts: Vec::new() };
    let mut envelope = Envelope::default();
    for layer in 0..most.min(n.saturating_sub(1)) {
        let before = &layers.costs[layer];
        let mut costs = before.clone();
        let mut cuts = vec![NONE; if trace { n } else { 0 }];
        envelope.clear();
        for i in asked((0..n - 1).rev()) {
            envelope.push((i + 1) as f64, before[i + 1], (i + 1) as u32);
            let name = envelope.best(weights[i]);
            let cost = (name as usize - i) as f64 * weights[i] + before[name as usize];
            if cost < costs[i] {
                costs[i] = cost;
                if trace {
                    cuts[i] = name;
                }
            }
        }
        layers.costs.push(costs);
        layers.cuts.push(cuts);
    }
    layers
}

/// Returns `costs[t][k]`: minus the greatest lower sum of the descending `weights[..k]`, with at most t cuts. `trace`
/// records the cuts.
pub(super) fn of_heads(weights: &[f64], most: usize, trace: bool) -> Layers {
    let n = weights.len();
    let first = (0..=n).map(|k| if k == 0 { 0.0 } else { -(k as f64 * weights[k - 1]) }).collect();
    let mut layers = Layers { costs: vec![first], cuts: Vec::new() };
    let mut envelope = Envelope::default();
    for layer in 0..most.min(n.saturating_sub(1)) {
        let before = &layers.costs[layer];
        let mut costs = before.clone();
        let mut cuts = vec![NONE; if trace { n + 1 } else { 0 }];
        envelope.clear();
        for k in asked(2..=n) {
            envelope.push((k - 1) as f64, before[k - 1], (k - 1) as u32);
            let name = envelope.best(weights[k - 1]);
            let cost = before[name as usize] - (k - name as usize) as f64 * weights[k - 1];
            if cost < costs[k] {
                costs[k] = cost;
                if trace {
                    cuts[k] = name;
                }
            }
        }
        layers.costs.push(costs);
        layers.cuts.push(cuts);
    }
    layers
}

/// Returns the smallest ratio of tail to head with `most` cuts in all, and the number of cuts in the tail.
pub(super) fn best_split(tail: &[f64], head: &[f64], most: usize) -> (f64, usize) {
    let mut best = (f64::INFINITY, 0);
    for in_tail in 0..=most.min(tail.len() - 1) {
        let kept = -head[(most - in_tail).min(head.len() - 1)];
        let ratio = tail[in_tail] / kept;
        if kept > 0.0 && ratio < best.0 {
            best = (ratio, in_tail);
        }
    }
    best
}
