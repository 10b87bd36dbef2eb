//! Import of random numbers.

use tilewright_graph::DType;
use tilewright_graph::op::{Distribution, Random};
use tilewright_runtime::host::RANDOM;

use super::job::NodeImport;
use crate::half_precision::is_half;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode};
use crate::scalar::{choose_if, input, less, number};

impl NodeImport<'_> {
    /// Draws random numbers by a function in C.
    pub(super) fn random(&mut self, op: &Random) -> Lowered {
        let to = self.output()?;
        let (is_normal, first, by) = match op.distribution {
            Distribution::Uniform { low, high } => (false, low, high - low),
            Distribution::Normal { mean, scale } => (true, mean, scale),
            Distribution::Bernoulli => return self.chances(op, to),
            Distribution::Multinomial { .. } => return Err(NoCode::Operator),
        };
        let shape = self.net.shape(to).to_vec();
        match self.net.value(to).dtype {
            dtype if is_half(dtype) => {
                let wide = self.value("wide", DType::F32, &shape);
                self.draw(op, [is_normal.into(), first, by], wide)?;
                self.push(Kind::Map(input(0)), &[wide], to);
                Ok(())
            }
            _ => self.draw(op, [is_normal.into(), first, by], to),
        }
    }

    /// Fills a tensor of f32 or f64 with numbers that are normal or not, from a mean or lower bound on, with
    /// a deviation or width.
    fn draw(&mut self, op: &Random, [is_normal, first, by]: [f64; 3], to: ValueId) -> Lowered {
        self.need_real(to)?;
        let key = op.key();
        let mut parameters = vec![self.type_number(to)?, self.net.value(to).n_elements(), is_normal as i64];
        parameters.extend([first, by].map(|x| x.to_bits().cast_signed()));
        parameters.extend([key.is_some().into(), key.unwrap_or_default().cast_signed()]);
        self.call(RANDOM, parameters, 0, &[], &[to]);
        Ok(())
    }

    /// Compares probabilities with uniform numbers.
    fn chances(&mut self, op: &Random, to: ValueId) -> Lowered {
        let shares = self.input(0)?;
        self.need_real(shares)?;
        self.need_code(to)?;
        let shape = self.net.shape(to).to_vec();
        let drawn = self.value("drawn", DType::F32, &shape);
        self.draw(op, [0.0, 0.0, 1.0], drawn)?;
        let is_one = choose_if(less(input(1), input(0)), number(1.0), number(0.0));
        self.push(Kind::Map(is_one), &[shares, drawn], to);
        Ok(())
    }
}
