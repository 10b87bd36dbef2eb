//! Bulk stores of boxes from shared memory to arrays, which may read shared memory at any time until a wait.
//!
//! Threads must fence the elements that they wrote to a box and then synchronize.

use super::bulk::Map;
use super::{Block, FENCED, Operand, Space, Thread, WARP, list};

/// Pending copy to an array.
pub struct Pending {
    /// Index of the thread that issued the copy, and of the copy's group.
    thread: u32,
    group: usize,
    /// Positions in shared memory and their contents, with the address of each element within the array.
    parts: Vec<(usize, Vec<u8>, Vec<Option<u64>>)>,
    element_bytes: usize,
}

impl Block<'_> {
    /// Stores tiles: thread `4·g + t` holds numbers `2·t` and `2·t + 1` of row `g` of each tile. Threads from
    /// `8·n` on provide the addresses of the rows of tile `n`.
    pub fn store_tiles(
        &mut self,
        threads: &mut [Thread],
        n: usize,
        to: &Operand,
        from: &Operand,
    ) -> Result<(), String> {
        for tile in 0..n {
            for row in 0..8 {
                let words = (0..4).map(|t| self.value(&threads[4 * row + t], &list(from)[tile]) as u32);
                let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
                let t = &mut threads[8 * tile + row];
                let address = self.address(t, to)?;
                self.note(t, address, 16);
                self.bytes(t, Space::Shared, address, 16)?.copy_from_slice(&bytes);
                let position = self.position(address)?;
                self.wrote(t, position, 16);
            }
        }
        Ok(())
    }

    /// Makes the fenced writes of a warp's threads visible.
    pub fn in_warp(&mut self, threads: &[Thread]) {
        let first = self.number(&threads[0]);
        let is_own = |who: u32| who & FENCED != 0 && (first..first + WARP as u32).contains(&(who & !FENCED));
        for (to, n) in &self.fenced {
            self.writers[*to..to + n].iter_mut().filter(|who| is_own(**who)).for_each(|who| *who = 0);
        }
        let writers = &self.writers;
        self.fenced.retain(|(to, n)| writers[*to..to + n].iter().any(|who| who & FENCED != 0));
    }

    /// Issues the copy of a box to an array.
    pub fn store_box(&mut self, t: &mut Thread, n: usize, x: &[Operand]) -> Result<(), String> {
        let [Operand::In(map, coordinates), from] = x else { return Err("operands".into()) };
        let from = self.address(t, from)?;
        let from = self.position(from)? as u64;
        let map = self.value(t, map);
        let words = self.memory.at(map, 128).ok_or("an array is told of nowhere")?;
        let words: Vec<u64> = words.chunks(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes"))).collect();
        let map = Map::read(&words);
        let first: Vec<i64> = coordinates.iter().map(|c| i64::from(self.value(t, c) as u32 as i32)).collect();
        if map.extents.len() != n || first.len() != n || map.rounds {
            return Err(format!("{} coordinates in an array of {} dimensions", first.len(), map.extents.len()));
        }
        let row = map.box_extents[0] * map.element_bytes;
        if !map.swizzled || row != 128 || !from.is_multiple_of(1024) || map.box_extents.iter().any(|n| *n > 256) {
            return Err(format!("a box of {:?} from {from}", map.box_extents));
        }
        if map.strides.iter().chain([&map.address]).any(|place| !place.is_multiple_of(16)) {
            return Err("the rows of an array do not begin at multiples of 16 bytes".into());
        }
        let n_rows: u64 = map.box_extents[1..].iter().product();
        let mut parts = Vec::new();
        for number in 0..n_rows {
            let (mut rest, mut to, mut is_inside) = (number, map.address, true);
            for (d, first) in first.iter().enumerate().skip(1) {
                let at = first + (rest % map.box_extents[d]) as i64;
                rest /= map.box_extents[d];
                is_inside &= (0..map.extents[d] as i64).contains(&at);
                to = to.wrapping_add_signed(at * map.strides[d - 1] as i64);
            }
            let element = |e: u64| {
                let at = first[0] + e as i64;
                let is_there = is_inside && (0..map.extents[0] as i64).contains(&at);
                is_there.then(|| to.wrapping_add_signed(at * map.element_bytes as i64))
            };
            let n_each = 16 / map.element_bytes;
            for part in 0..row / 16 {
                let address = from + number * row + 16 * part;
                let place = (address ^ (address >> 7 & 7) << 4) as usize;
                let who = self.writers.get(place..place + 16).ok_or("a box is outside of shared memory")?;
                if let Some(who) = who.iter().find(|who| **who > 0) {
                    let lacks = if who & FENCED == 0 { "made no fence" } else { "nobody has waited for it" };
                    return Err(format!("thread {} wrote to {place}, and {lacks}", (who & !FENCED) - 1));
                }
                let to: Vec<Option<u64>> = (part * n_each..(part + 1) * n_each).map(element).collect();
                parts.push((place, self.shared[place..place + 16].to_vec(), to));
            }
        }
        let (thread, element_bytes) = (self.number(t), map.element_bytes as usize);
        self.stores.push(Pending { thread, group: t.n_stores, parts, element_bytes });
        Ok(())
    }

    /// Ends a group of a thread's copies.
    pub fn end_stores(&mut self, t: &mut Thread) {
        t.n_stores += 1;
    }

    /// Waits for all but the last `left` groups of a thread's copies.
    pub fn wait_for_stores(&mut self, t: &mut Thread, left: usize) -> Result<(), String> {
        let me = self.number(t);
        let is_awaited = |pending: &Pending| pending.thread == me && pending.group + left < t.n_stores;
        let (over, others): (Vec<Pending>, Vec<Pending>) =
            std::mem::take(&mut self.stores).into_iter().partition(is_awaited);
        self.stores = others;
        for Pending { parts, element_bytes, .. } in over {
            for (place, bytes, to) in parts {
                if self.shared[place..place + 16] != bytes {
                    return Err(format!("what is at {place} changed while it was copied to an array"));
                }
                for (bytes, to) in bytes.chunks(element_bytes).zip(to) {
                    let Some(to) = to else { continue };
                    let there = self.memory.at(to, element_bytes).ok_or("an array is not in memory")?;
                    there.copy_from_slice(bytes);
                }
            }
        }
        Ok(())
    }
}
