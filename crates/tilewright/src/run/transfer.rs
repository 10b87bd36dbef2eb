//! Transfer learning: use of earlier records of other workloads.

use std::path::{Path, PathBuf};

use tilewright_formats::{carried_over, name_of, read};
use tilewright_ir::op::Workload;
use tilewright_search::{Config, Space};
use tilewright_tune::{EarlierTask, PassedOver, Store, TaskKey, Validator};

use crate::best::trials_of;
use crate::database::Database;
use crate::error::{Error, ErrorKind, Setting, one_line};
use crate::format::count;
use crate::observer::{Note, Observer};

/// Source for transfer learning: a database, and optionally some of its workloads.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// Path of the database.
    pub path: PathBuf,
    /// Texts of the workloads; empty for all but the one that is tuned.
    workloads: Vec<String>,
    /// Whether it is no error if there is nothing to learn from.
    pub(crate) is_optional: bool,
    /// Option by which the user named it, if so.
    option: Option<&'static str>,
}

impl Transfer {
    /// Sets the option that names it, for messages.
    #[must_use]
    pub fn called(self, option: &'static str) -> Transfer {
        Transfer { option: Some(option), ..self }
    }

    /// Makes the source optional: it may have no usable records, as for the first of several tasks that learn
    /// from each other.
    #[must_use]
    pub fn optional(self) -> Transfer {
        Transfer { is_optional: true, ..self }
    }

    /// Parses `DB[,WORKLOAD…]`. Workloads contain commas themselves: a part `key=value` belongs to the
    /// workload before it. If the whole text is the path of a file, it is that file, as the file names of
    /// vLLM's tables contain commas.
    ///
    /// # Errors
    /// If the text is malformed, with the reason in one line.
    pub fn parse(text: &str) -> Result<Transfer, String> {
        let (path, rest) = match text.split_once(',') {
            Some((path, rest)) if !Path::new(text).is_file() => (path, Some(rest)),
            _ => (text, None),
        };
        let path =
            PathBuf::from(Some(path).filter(|path| !path.is_empty()).ok_or("the name of a database is missing")?);
        let mut texts: Vec<String> = Vec::new();
        for part in rest.into_iter().flat_map(|rest| rest.split(',')) {
            match texts.last_mut() {
                Some(workload) if part.contains('=') && !part.contains(':') => *workload += &format!(",{part}"),
                _ => texts.push(part.to_owned()),
            }
        }
        let mut workloads = Vec::new();
        for text in texts {
            let named = Workload::parse_all(&text).map_err(|error| one_line(&error.to_string()))?;
            workloads.extend(named.iter().map(Workload::to_string));
        }
        Ok(Transfer { path, workloads, is_optional: false, option: None })
    }

    /// Opens the database, and lists the tasks that it has trials of.
    ///
    /// # Errors
    /// Bad input if there is no database, or it has no trials of a workload that is named.
    pub fn open(&self) -> Result<(Store, Vec<TaskKey>), Error> {
        let database = self.database()?;
        let name = database.name();
        let store = database
            .open_to_read()?
            .ok_or_else(|| Error::of(ErrorKind::NoDatabase, format!("there is no database {name} to learn from")))?;
        let keys = store.tasks().map_err(|error| database.refuse(error))?;
        if let Some(missing) = self.workloads.iter().find(|w| !keys.iter().any(|key| key.workload == **w)) {
            let reason = format!("no trials of {missing} are in database {name}");
            return Err(Error::input(format!("{reason} (leave workloads out to learn from all)")));
        }
        Ok((store, keys))
    }

    /// Path of the file, if it is another tuner's and has no workloads of ours.
    ///
    /// # Errors
    /// If workloads are named.
    pub fn file(&self) -> Result<PathBuf, Error> {
        if self.workloads.is_empty() {
            return Ok(self.path.clone());
        }
        let reason = "a command and a kernel of yours begin with a file of results of another tuner";
        Err(Error::setting(Setting::Transfer, format!(": {reason} (leave the workloads out)")))
    }

    fn database(&self) -> Result<Database, Error> {
        let database = Database::new(Some(&self.path))?;
        Ok(self.option.map_or(database.clone(), |option| database.called(option)))
    }

    /// Earlier tasks with plausible records, except the current one. Records of any version of a space count:
    /// their steps make a program, and their configurations are mapped to the current space.
    ///
    /// # Errors
    /// As [`Transfer::open`].
    pub fn tasks(&self, at_hand: &TaskKey, observer: &dyn Observer) -> Result<Vec<EarlierTask>, Error> {
        let (store, mut keys) = self.open()?;
        let is_asked = |key: &TaskKey| self.workloads.is_empty() || self.workloads.contains(&key.workload);
        keys.retain(|key| key != at_hand && is_asked(key));
        let mut tasks = Vec::with_capacity(keys.len());
        let (mut passed_over, database) = (PassedOver::default(), self.database()?);
        for key in keys {
            // Another version may know other workloads.
            let Ok(workload) = Workload::parse(&key.workload) else { continue };
            let validator = |template: &str| Validator::new(&workload, &key.target, key.threads, template, None);
            let found = trials_of(&store, &key, &validator, &mut passed_over);
            let records = found.map_err(|error| database.refuse(error))?;
            tasks.push(EarlierTask { workload, template: key.template, threads: key.threads, records });
        }
        if passed_over.total() > 0 {
            observer.note(Note::Message(format!("{}: {passed_over}", self.name())));
        }
        Ok(tasks)
    }

    /// Name of the database, for messages.
    pub fn name(&self) -> String {
        one_line(&self.path.display().to_string())
    }
}

/// Best configurations of another tuner's file, mapped to a space.
///
/// # Errors
/// If the file cannot be read, or none of its configurations fits.
pub(super) fn best_of_file(path: &Path, space: &Space, observer: &dyn Observer) -> Result<Vec<Config>, Error> {
    let refuse =
        |reason: &dyn std::fmt::Display| Error::setting(Setting::Transfer, format!(": {}: {reason}", path.display()));
    let bytes = crate::file::read(path, "results of a tuner, such as a cache of Kernel Tuner's")?;
    let read = read(&name_of(path), &bytes, None, None).map_err(|error| refuse(&error))?;
    let others =
        read.results.iter().filter_map(|results| results.best_config().transpose()).collect::<Result<Vec<_>, _>>();
    let configs = carried_over(space, &others.map_err(|error| refuse(&error))?);
    if configs.is_empty() {
        let names = space.names().collect::<Vec<_>>().join(", ");
        let reason = format!("{}: none of its results has the parameters {names}", path.display());
        return Err(Error::of(ErrorKind::NothingToTransfer, reason));
    }
    let n_configs = count(configs.len() as u64, "configuration");
    observer.note(Note::Message(format!("beginning with {n_configs} carried over from {}", path.display())));
    Ok(configs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_keep_their_commas() {
        let read = |text: &str| Transfer::parse(text).map(|t| (t.path.display().to_string(), t.workloads));
        assert_eq!(read("a.db"), Ok(("a.db".to_owned(), vec![])));
        let product = "matmul:m=8,n=8,k=16".to_owned();
        let (path, workloads) =
            read("a.db,matmul:m=8,n=8,k=16,resnet18.C1:layout=blocked,const=w,matmul:n=8,m=8,k=16").unwrap();
        assert_eq!((path.as_str(), workloads.len(), &workloads[0]), ("a.db", 3, &product));
        assert_eq!(workloads[2], product, "texts are canonical");
        assert_eq!(read("a.db,resnet18").unwrap().1.len(), 12);
        assert!(read("").is_err() && read(",matmul-256").is_err() && read("a.db,nosuch").is_err());
    }

    #[test]
    fn a_table_has_commas_in_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3.json");
        let text = table.to_str().unwrap();
        assert!(Transfer::parse(text).is_err(), "nothing is there");
        std::fs::write(&table, "{}").unwrap();
        let read = Transfer::parse(text).unwrap();
        assert_eq!((read.path, read.workloads), (table, vec![]));
    }
}
