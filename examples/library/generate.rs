//! Greedy decoding: `generate N ID...` prints the N tokens that follow those that are given.

/// Number of tokens, as the model has it.
const VOCABULARY: usize = 32000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<Vec<i64>, _>>()?;
    let (&n_new, prompt) = numbers.split_first().ok_or("generate N ID...")?;
    let mut context = decoder::Context::new(0)?;
    let mut scores = vec![0.0; VOCABULARY];
    let mut token = 0;
    for at in 0..prompt.len() + n_new as usize - 1 {
        token = prompt.get(at).copied().unwrap_or(token);
        context.run(&[token], &mut scores)?;
        token = (0..VOCABULARY).max_by(|a, b| scores[*a].total_cmp(&scores[*b])).unwrap_or(0) as i64;
        if at + 1 >= prompt.len() {
            println!("{token}");
        }
    }
    Ok(())
}
