//! Constant operands of 9 bits as sums of i8 operands.

/// Constant operand as i8: an input with a larger weight is read several times, each time with a part of the
/// weight.
#[derive(Debug, PartialEq)]
pub struct SplitFactor {
    /// Weights, `[groups, outputs, columns, inside]`.
    pub numbers: Vec<i128>,
    /// Input that each column of each group reads, of `groups · inputs`.
    pub columns: Vec<usize>,
}

impl SplitFactor {
    /// Whether each input is read once, so that nothing was split.
    pub fn is_plain(&self) -> bool {
        self.columns.iter().enumerate().all(|(at, input)| at == *input)
    }
}

/// Splits weights `[groups, outputs, inputs, inside]`. If the number of inputs is a multiple of `block`, so
/// is the number of columns.
pub fn split(numbers: &[i64], [groups, outputs, inputs, inside]: [usize; 4], block: usize) -> SplitFactor {
    let mut rest = numbers.to_vec();
    let at = |[group, output, input]: [usize; 3]| ((group * outputs + output) * inputs + input) * inside;
    // Columns of each group: an input, and its weights for all outputs.
    let mut taken: Vec<Vec<(usize, Vec<i8>)>> = vec![Vec::new(); groups];
    for (group, columns) in taken.iter_mut().enumerate() {
        let mut reads: Vec<usize> = (0..inputs).collect();
        while !reads.is_empty() {
            for &input in &reads {
                let mut factors = Vec::with_capacity(outputs * inside);
                for output in 0..outputs {
                    for number in &mut rest[at([group, output, input])..][..inside] {
                        let part = (*number).clamp(i8::MIN.into(), i8::MAX.into());
                        *number -= part;
                        factors.push(part as i8);
                    }
                }
                columns.push((input, factors));
            }
            let has_more =
                |input: &usize| (0..outputs).any(|o| rest[at([group, o, *input])..][..inside].iter().any(|&x| x != 0));
            reads.retain(has_more);
        }
    }
    let most = taken.iter().map(Vec::len).max().unwrap_or(0);
    let wide = if inputs.is_multiple_of(block) { most.next_multiple_of(block) } else { most };
    for columns in &mut taken {
        columns.resize(wide, (0, vec![0; outputs * inside]));
    }
    let mut split = SplitFactor { numbers: Vec::with_capacity(groups * outputs * wide * inside), columns: Vec::new() };
    for (group, columns) in taken.iter().enumerate() {
        split.columns.extend(columns.iter().map(|(input, _)| group * inputs + input));
        for output in 0..outputs {
            let factors = columns.iter().flat_map(|(_, factors)| &factors[output * inside..][..inside]);
            split.numbers.extend(factors.map(|&x| i128::from(x)));
        }
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_columns_are_the_factors() {
        let mut state = 7_u64;
        let mut next = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for case in 0..200 {
            let dims = [1 + next(3), 1 + next(4), 1 + next(9), 1 + next(3)].map(|n| n as usize);
            let [groups, outputs, inputs, inside] = dims;
            let (reach, block) = ([128, 140, 256][case % 3], 1 + next(4) as usize);
            let numbers: Vec<i64> =
                (0..dims.iter().product::<usize>()).map(|_| next(2 * reach - 1) as i64 - (reach as i64 - 1)).collect();
            let split = split(&numbers, dims, block);
            let n_columns = split.columns.len() / groups;
            assert!(split.is_plain() || numbers.iter().any(|x| i8::try_from(*x).is_err()));
            assert!(!inputs.is_multiple_of(block) || n_columns.is_multiple_of(block));
            assert!(split.numbers.iter().all(|x| i8::try_from(*x).is_ok()));
            let mut sums = vec![0_i64; numbers.len()];
            for (at, x) in split.numbers.iter().enumerate() {
                let (inner, column) = (at % inside, at / inside % n_columns);
                let (output, group) = (at / inside / n_columns % outputs, at / inside / n_columns / outputs);
                let input = split.columns[group * n_columns + column];
                assert_eq!(input / inputs, group, "a group reads its own inputs");
                sums[((group * outputs + output) * inputs + input % inputs) * inside + inner] += *x as i64;
            }
            assert_eq!(sums, numbers, "{dims:?}");
        }
    }
}
